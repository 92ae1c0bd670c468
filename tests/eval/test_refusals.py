"""What a user gets wrong: one line on stderr, exit status 2, and nothing left in the folder."""

import json

import pytest
from tiny import tiny_model
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM
from words import TEXT, make_tokenizer, save_llama

from cab_hf.engines.sparse import Sparse
from cab_hf.eval.__main__ import main

# of each command on a model, what is small enough to run here
SMALL = {
    "passkey": "--methods dense,cab --lengths 300 --depths 1 --samples 1 --controls 0",
    "fidelity": "--methods dense --lengths 900 --pass-samples 1 --documents 1 --keys 2",
    "calibrate": "--length 1500 --documents 1 --target-densities 0.9",
}
NAN = "model.embed_tokens.weight", float("nan")
LENGTH = {"passkey": "lengths", "fidelity": "lengths", "calibrate": "length"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, and files that are nothing to read."""
    folder = tmp_path_factory.mktemp("given")
    save_llama(folder / "own")
    (folder / "book.txt").write_text(TEXT)
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "zeros").write_text("a text. \0 of zeros.")
    (folder / "empty").touch()
    (folder / "blank").write_text(" \n")
    (folder / "folder").mkdir()
    (folder / "a").mkdir()
    for name in ("a/b.txt", "b.md", "b.json"):
        (folder / name).write_text(TEXT)
    (folder / "list.json").write_text("[]")
    (folder / "list.yaml").write_text("- mass_threshold: 0.5")
    (folder / "odd.yaml").write_text("wide: {weight: 3}")
    (folder / "broken.yaml").write_text("lengths: [")
    (folder / "unknown.yaml").write_text("lenghts: 300")
    return folder


@pytest.fixture
def refused(folder, tmp_path, capsys, monkeypatch):
    """(command, words) -> what it says; HERE in words is where the files are."""
    monkeypatch.chdir(folder)
    out = tmp_path / "out"

    def run(command, words, model="own"):
        words = [*command.split(), *words.split()]
        if command in SMALL:
            fixed = ["--model", model, *SMALL[command].split(), "--device", "cpu"]
            words = [words[0], *fixed, *words[1:]]
        capsys.readouterr()
        try:
            status = main([*words, *([] if "--out" in words else ["--out", str(out)])])
        except SystemExit as stop:
            status = stop.code
        said = capsys.readouterr().err
        assert status == 2 and said.count("\n") == 1 and said.startswith("python -m cab_hf.eval")
        assert not out.exists()
        return said

    return run


def table(lines):
    """The cases of lines, ``words > what is said``, by their words."""
    rows = [line.split(" > ") for line in lines.strip().splitlines()]
    return [pytest.param(*row, id=row[0]) for row in rows]


@pytest.mark.parametrize("command", SMALL)
@pytest.mark.parametrize(
    ("words", "message"),
    table("""
--model no/such/model > model 'no/such/model' is not here
--model folder > model 'folder' cannot be loaded
--model book.txt > model 'book.txt' cannot be loaded
--device gpu > device must be one that torch computes on
--device cuda:99 > got 'cuda:99'
--device meta > got 'meta'
--dtype float13 > dtype is 'float13'; it must be one of bfloat16
--dtype int8 > dtype is 'int8'
--dtype load > dtype is 'load'
--LENGTH 30 > length 30 has no room for
--LENGTH 0 > must be
--LENGTH -5 > must be
--LENGTH 99999 > must be at most 2048, as far as the positions
--LENGTH 1e3 > a length is a number of tokens
--cab mas=1 > mas
--cab mass_threshold=9 > mass_threshold
--cab engine=magic > CabConfig.engine is 'magic'
--cab predictor=magic > CabConfig.predictor is 'magic'
--config broken.yaml > config must be a YAML file
--config unknown.yaml > unknown.yaml sets 'lenghts'
--config binary > config must be a YAML file
--config none.yaml > config must be a YAML file
--out book.txt > book.txt/FIRST cannot be written
--out book.txt/deep > cannot be written
--out /proc/none > cannot be written
--zzz > there is no option '--zzz'
--trust-remote-code maybe > it is turned on by its name
"""),
)
def test_of_a_model_and_a_run(refused, command, words, message):
    # what a command writes first
    first = "" if command == "calibrate" else "/samples.jsonl"
    message = message.replace("/FIRST", first)
    assert message in refused(command, words.replace("LENGTH", LENGTH[command]))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param("passkey", "--filler text --haystack", id="passkey"),
        pytest.param("fidelity", "--texts", id="fidelity"),
        pytest.param("calibrate", "--texts", id="calibrate"),
    ],
)
@pytest.mark.parametrize(
    ("file", "message"),
    table("""
binary > UTF-8 text; got 'binary' (not UTF-8)
zeros > UTF-8 text; got 'zeros' (binary)
empty > UTF-8 text; got 'empty' (empty)
blank > UTF-8 text; got 'blank' (empty)
folder > must be
none.txt > must be
"""),
)
def test_of_a_text(refused, command, words, file, message):
    assert message in refused(command, f"{words} {file}")


PASSKEY = """
--samples -1 > samples is -1; it must be at least 1
--samples 0 > samples is 0
--methods magic > methods is 'magic'
--methods random > budget is 'match'; it must be a density such as 0.2
--budget 1.5 > budget is 1.5
--depths 0.5,1.5 > depths is (0.5, 1.5)
--controls 9 > controls is 9
--stage decode > stage is 'decode'
--filler prose > filler is 'prose'
--filler text > haystack is None
--haystack x.txt > haystack is 'x.txt'
--filler text --haystack no.txt > haystack is 'no.txt'
--keys 99 > keys is 99
--cab engine > cab: an assignment is field=value
--cab mass_threshold=3 > mass_threshold is 3
--cab weight=3 > no field 'weight'
--stage both --lengths 511 --cab decode_tokens=128 > lengths is (511,)
--lengths many > lengths: a length is a number of tokens
"""
FIDELITY = """
--methods h2o > methods is 'h2o'
--methods snapkv --probes decode --prefill-chunk 64 > prefill_chunk is 64
--methods magic > methods is 'magic'
--methods cab,h2o --probes decode > match is 'cab'
--equal speed > equal is 'speed'
--equal time --budgets 0.3 > budgets is (0.3,)
--budgets match,2 > budgets is ('match', 2.0)
--methods random > budgets is ('match',); it must be a density such as 0.2
--match cab:wide > match is 'cab:wide'
--probes pass,guess > probes is 'guess'
--probes recall_border --variant a=query_block=256 --variant b=query_block=384 > probes is
--probes decode --lengths 584 --variant a=sparse_decode=true,decode_tokens=128 > lengths is (584,)
--probes turns --lengths 2560,1279 --cab query_block=128 > must be at least 1280 each for turns
--probes turns --methods dense,published --budgets 0.5 --lengths 639 > must be at least 640 each
--probes turns --methods h2o > methods is 'h2o'
--probes uuid --lengths 90 > lengths: length 90 has no room
--lengths 1 > lengths is (1,)
--documents -1 > documents is -1
--documents 0 > documents is 0
--written 0 > written is 0
--keys 99 > keys is 99
--asked 99 > asked is 99
--asked 0 --probes asked > asked is 0
--texts no.txt > texts is 'no.txt'
--texts a/b.txt,b.md > texts is ('a/b.txt', 'b.md')
--variant wide > variant: an assignment is field=value
--variant wide= > variant is 'wide='
--variant =mass_threshold=0.08 > variant is '=mass_threshold=0.08'
--variant wide=weight=3 > no field 'weight'
--variant wide=mass_threshold=3 > mass_threshold is 3
--variant wide=no.json > variant must name a JSON file
--variant wide=b.json > variant must name a JSON file
--variant wide=list.json > must be a dict of CabConfig
--variant no.yaml > variant: no.yaml must be
--variant list.yaml > variant: list.yaml must hold names
--variant odd.yaml > no field 'weight'
"""
OTHERS = {
    "families": """
--types llama,llamma > types is 'llamma'
--ranks 0 > ranks is 0
""",
    "calibrate": """
--documents 0 > documents is 0
--target-densities 7 > must be in (0, 1]
--target-densities 1.5 > target_densities is (1.5,)
--texts nowhere.txt > texts is 'nowhere.txt'
--cab mas=1 > CabConfig has no field 'mas'
""",
    "speed predictor": """
--lengths 0 > lengths is (0,)
--heads 6 --kv-heads 4 > heads is 6
--batch 0 > batch is 0
--dtype int8 > dtype is 'int8'
--cab mass_threshold=3 > CabConfig.mass_threshold is 3
--cab weight=3 > no field 'weight'
""",
    "speed attention": """
--device gpu > device must be one
--seed 99999999999999999999 > seed is 99999999999999999999
--directions sideways > directions is ('sideways',)
--engines steam > engines is ('steam',)
--blocks 128 > blocks is ('128',)
--blocks 100x10 > a multiple of 16
--densities 1.5 > max_density is 1.5
--cab max_density=0.3 > cab sets max_density
--head-dims 0 > head_dims is (0,)
--heads 5 > heads is 5
""",
    "speed ttft": """
--device meta > device must be one
--cab engine=magic > engine is 'magic'
--max-density 512:0.1 > pairs that name 256 tokens
--max-density 512:0.1 --lengths 256 > max_density is ('512:0.1',)
--max-density much > max_density is ('much',)
--max-density 1.5 > max_density is 1.5
--cab max_density=0.3 > cab sets max_density
--heads 3 > heads is 3
--layers 0 > layers is 0
--implementations FA9 > implementations is ('FA9',)
--runs 0 > runs is 0
--behind 9 --lengths 64 > lengths is (64,); it must be at least query_block=128 each behind a cache
""",
    "speed prefill": """
--chunk 100 > chunk is 100; it must be a multiple of query_block=128
--chunk 0 > chunk is 0
--longest maybe > longest: it is turned on by its name
--max-density 0.1,256:0.2 > max_density is ('0.1', '256:0.2')
""",
    "speed lora": """
--implementations cab-always > must be out of sdpa, cab
--rank 0 > rank is 0
--spread fsdp1 > spread is ('fsdp1',)
--spread alone,cp > torchrun --nproc_per_node=N -m cab_hf.eval speed lora.
--spread cp --implementations sdpa > implementations is ('sdpa',)
--multiple 0 > multiple is 0
--longest --max-density 256:0.1,512:0.2 > max_density is ('256:0.1', '512:0.2')
--longest --max-density 512:0.1 --lengths 512 > max_density is ('512:0.1',)
""",
    "speed context-parallel": """
--shape gpt > shape is 'gpt'
--schemes ulysses > schemes is ('ulysses',)
--directions back > directions is ('back',)
--max-density 512:0.1 > that name 1,024 tokens
--cab query_block=256 > they must divide 128
--runs 0 > runs is 0
--device cpu:0 > device is 'cpu:0'
""",
    "speed batches": """
--layouts ragged > layouts is ('ragged',)
--batches 0 > batches is (0,)
--densities 2 > max_density is 2
--cab max_density=0.1 > cab sets max_density
""",
    "speed decode": """
--parts mlp > parts is ('mlp',)
--kernels FA9 > kernels is ('FA9',)
--budgets 1.5 > decode_tokens is 1.5
--cab decode_tokens=128 > cab sets decode_tokens
--batches 0 > batches is (0,)
""",
    "speed serve": """
--requests 256:2 > requests is ('256:2',)
--requests 1,1024:2 > it must be of lengths out of 256, 512
--requests=-1 > requests is ('-1',)
--requests 0 > requests is ('0',)
--implementations FA3 > must be out of sdpa, flash_attention_3
--max-density 0.1,512:0.2 > max_density is ('0.1', '512:0.2')
--new-tokens 1 > new_tokens is 1
--rate=-1 > rate is -1.0
--shared 256 > shared is 256
--memory 2 > memory is 2.0
--page-size 2 > page_size is 2
--warm-up 0 > warm_up is 0
--batch-tokens 0 > batch_tokens is 0
--blocks 0 > blocks is 0
""",
}


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        pytest.param(command, *case.values, id=f"{command} {case.id}")
        for command, lines in {"passkey": PASSKEY, "fidelity": FIDELITY, **OTHERS}.items()
        for case in table(lines)
    ],
)
def test_of_one_command(refused, command, words, message):
    device = "--device cpu " if "speed" in command and "--device" not in words else ""
    assert message in refused(command, device + words)


@pytest.mark.parametrize(
    "words", ["--results none", "--results book.txt", "--page none.md", "--page folder"]
)
def test_of_pages(folder, monkeypatch, capsys, words):
    monkeypatch.chdir(folder)
    assert main(["readme", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m cab_hf.eval readme: ") and said.count("\n") == 1


def test_what_no_target_can_have_is_told_by_its_name(folder, tmp_path, capsys):
    words = f"calibrate --model {folder}/own {SMALL['calibrate']} --device cpu --out {tmp_path}"
    assert main([*words.split(), "--target-densities", "0.001"]) == 2
    assert "target_densities: target_density is 0.001; it must be" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["passkey", "fidelity"])
def test_what_cab_does_not_compute_is_a_line_too(tmp_path, capsys, command):
    """A refusal of the library, in the middle of a forward pass."""
    tokenizer, sizes = make_tokenizer(), {"hidden_size": 32, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    soft_capped = Gemma2Config(**sizes, vocab_size=len(tokenizer), head_dim=16, eos_token_id=1)
    Gemma2ForCausalLM(soft_capped).save_pretrained(tmp_path / "gemma")
    tokenizer.save_pretrained(tmp_path / "gemma")
    words = f"{command} --model {tmp_path}/gemma {SMALL[command]} --methods cab --device cpu"
    assert main([*words.split(), "--out", str(tmp_path / "out")]) == 2
    assert "model: softcap is set (soft-capped logits)" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "more", "weights", "damage"),
    [
        *(pytest.param(command, words, *NAN, id=command) for command, words in SMALL.items()),
        pytest.param(
            "passkey", SMALL["passkey"], "lm_head.weight", float("inf"), id="infinite-outputs"
        ),
    ],
)
def test_a_model_that_is_not_finite_is_refused(
    folder, tmp_path, capsys, monkeypatch, command, more, weights, damage
):
    monkeypatch.chdir(folder)
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM.from_pretrained("own")
    model.get_parameter(weights).data[:] = damage
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "damaged")
    words = f"{command} --model {tmp_path}/damaged {more} --device cpu --out {tmp_path}/out"
    assert main(words.split()) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "model: The model's outputs are not finite (NaN or infinite) under" in said
    assert not (tmp_path / "out" / "results.json").exists()


def test_outputs_that_are_not_finite_under_one_method_are_refused_by_its_attention(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Sparse, "attend", lambda self, q, k, v, scale: q * float("nan"))
    words = f"passkey --model {folder}/own {SMALL['passkey']} --device cpu --out {tmp_path}/out"
    assert main(words.split()) == 2
    assert "not finite (NaN or infinite) under cab attention" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("of a builtin"), KeyError("lost")])
def test_a_bug_is_not_told_as_a_refusal(folder, tmp_path, monkeypatch, error):
    from cab_hf.eval.passkey import Passkey

    def broken(self, prompt, method):
        raise error

    # raised here, by no statement of cab_hf
    monkeypatch.setattr(Passkey, "answer", broken)
    words = f"passkey --model {folder}/own {SMALL['passkey']} --device cpu --out {tmp_path}/out"
    with pytest.raises(type(error)):
        main(words.split())


def test_a_length_beyond_the_positions_is_refused_with_what_is_written_behind(tmp_path, refused):
    """The last answer would have no position, where these are learned."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = make_tokenizer()
    shape = GPT2Config(
        n_embd=16, n_head=2, n_layer=1, vocab_size=len(tokenizer), n_positions=300, eos_token_id=1
    )
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    shown = "lengths must be at most 292, as far as the positions"
    assert shown in refused("passkey", "--lengths 293", model=str(tmp_path / "gpt2"))


def test_lengths_up_to_the_positions_are_not_refused(tmp_path):
    model, tokenizer = tmp_path / "tiny", make_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": 1, "pad_token_id": 1}
    tiny_model(num_hidden_layers=1, max_position_embeddings=300, **sizes).save_pretrained(model)
    tokenizer.save_pretrained(model)
    words = f"passkey --model {model} {SMALL['passkey']} --device cpu --out {tmp_path}/out"
    assert main(words.split()) == 0
    (_, sample, *_) = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    assert 295 < json.loads(sample)["tokens"] <= 300
