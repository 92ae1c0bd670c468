"""``speed context-parallel``: two processes, killed and resumed, and its parts by hand."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from bench import shown, torchrun

from cab_hf import distributed
from cab_hf.eval import experiment
from cab_hf.eval.__main__ import main
from cab_hf.eval.experiment import named
from cab_hf.eval.speed import forecast, links, schemes, sharded_layer
from cab_hf.eval.speed.context_parallel import ContextParallel, Settings, noted
from cab_hf.eval.speed.links import BOTH, FORWARD
from cab_hf.eval.speed.team import Team, recorded, replay
from cab_hf.eval.speed.timing import Bench

COMMAND = ["speed", "context-parallel"]
# 900 tokens leave padding on a rank
QUICK = ["--device", "cpu", "--lengths", "900", "--seconds", "0", "--runs", "2"]
# the same program, killed on rank 0 at the case of that number
KILLED = """
import os, signal, sys
from cab_hf.eval.__main__ import main
from cab_hf.eval.speed.context_parallel import ContextParallel
from cab_hf.runs import provenance

# somebody may commit between two runs
provenance.git_commit = lambda: "0" * 40
measure, asked, last = ContextParallel.measure, [], int(sys.argv[1])

def meddled(self, case):
    asked.append(case)
    if len(asked) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(self, case)

ContextParallel.measure = meddled
raise SystemExit(main(sys.argv[2:]))
"""


def settings_of(**more):
    given = {"device": "cpu", "lengths": (600,), "seconds": 0.0, "runs": 1, "link_mib": (0.01, 0.1)}
    return Settings(**{**given, **more})


# --- the command


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """(the log that a kill left, the folder of the run that went on)."""
    out = tmp_path_factory.mktemp("parallel")
    script = out / "killed.py"
    script.write_text(KILLED)
    folder = out / "run"
    words = [*COMMAND, *QUICK, "--out", str(folder)]
    assert torchrun(str(script), "8", *words).returncode != 0
    left = (folder / "samples.jsonl").read_text()
    done = torchrun(str(script), "0", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return left, folder


@pytest.mark.slow
def test_a_killed_run_goes_on(resumed):
    left, folder = resumed
    complete = (folder / "samples.jsonl").read_text()
    # a header and seven cases, of fifteen
    assert left.count("\n") == 8 and complete.startswith(left) and complete.count("\n") == 16


@pytest.mark.slow
def test_a_whole_run(resumed):
    _, folder = resumed
    results = json.loads((folder / "results.json").read_text())
    rows = [row for row in results["rows"] if row["measured"]]
    assert results["provenance"]["settings"]["worlds"] == [2]
    schemes = [*sharded_layer.ALONE, *sharded_layer.OVER_RANKS]
    actual = [(row["direction"], row["scheme"]) for row in rows if row["scheme"] != "links"]
    assert actual == [(way, scheme) for way in (FORWARD, BOTH) for scheme in schemes]
    assert [row["world"] for row in rows[:7]] == [1, 1, 2, 2, 2, 2, 2]
    for row in rows:
        # on the CPU a ring is differentiated as well
        assert row["error"] is None
        if row["scheme"] == "links":
            # from one other rank
            sizes = [[received for received, _ in each] for each in row["points"].values()]
            assert sizes == [[2**17, 2**19, 2**21]] * 2
        elif row["scheme"] in sharded_layer.OVER_RANKS:
            assert row["efficiency"] == row["alone_ms"] / row["ms"] / 2
            assert row["collectives_share"] == row["collectives_ms"] / row["ms"] > 0
        assert (row["of_two_launches"] is not None) == (row["scheme"] == "grouped")
        if row["scheme"] != "links":
            assert len(row["each_ms"]) == 2 and sum(row["each_ms"]) / 2 == pytest.approx(row["ms"])
    sparse = [row for row in rows if "cab" in row["scheme"]]
    alone, over = sparse[::2], sparse[1::2]
    for one, many in zip(alone, over, strict=True):
        # the plan of one process, whose rows the ranks share out; rank 0 has those that end it
        assert one["density"] == many["density"] < 1
        assert one["needed"] is None and many["needed_by_rank"][0] == 1 > many["needed_by_rank"][1]
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_one_launch_is_held_against_two_with_an_interval(resumed):
    rows = json.loads((resumed[1] / "results.json").read_text())["rows"]
    for way in (FORWARD, BOTH):
        outcome = {
            row["scheme"]: row for row in rows if row["direction"] == way and row["measured"]
        }
        one, two = outcome["grouped"], outcome["two-launches"]
        result = one["of_two_launches"]
        assert 0 < result["low"] <= result["ratio"] <= result["high"]
        # one run each has none, nor has a log of before runs were recorded
        for each in ([1.0], None):
            alone = forecast.compared({**one, "each_ms": each}, two)
            assert alone == {"of_two_launches": {"ratio": one["ms"] / two["ms"]}}
    assert "| of two launches |" in (resumed[1] / "report.md").read_text()


@pytest.mark.slow
def test_a_report_says_how_it_was_torchrun(resumed):
    text = (resumed[1] / "report.md").read_text()
    begun = "torchrun --nproc_per_node=2 -m cab_hf.eval speed context-parallel --lengths 900"
    assert begun in text
    assert "ran as | reference | 900 | alone, alone+cab, ring on 2" in text


@pytest.mark.slow
def test_bytes_that_travel_are_those_of_the_model(resumed):
    rows = json.loads((resumed[1] / "results.json").read_text())["rows"]
    # four chunks of 256 tokens; K and V of two heads of 16 channels of four bytes
    text = links.Text(900, 2, 512, 2 * 16 * 4, (1, 1))
    for row in rows:
        if row["measured"] and row["scheme"] in sharded_layer.OVER_RANKS:
            # K and V, and their gradients: the reference keeps copies of its own, so that nothing
            # is gathered again
            meant = text.received(text.heads) * (1 if row["direction"] == "forward" else 2)
            # summaries of keys and queries travel for cab
            least, most = (1.01, 2.0) if "cab" in row["scheme"] else (1.0, 1.0)
            assert least * meant <= row["received_bytes"] <= most * meant


def test_without_torchrun_it_says_how_to_launch(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert main([*COMMAND, *QUICK, "--out", str(tmp_path / "none")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    command = "torchrun --nproc_per_node=N -m cab_hf.eval speed context-parallel."
    assert said.endswith(command)
    assert not (tmp_path / "none").exists()


def test_densities_may_vary_with_length():
    settings = settings_of(lengths=(600, 1200), max_density=("0.4", "1200:0.2"))
    assert [settings.budgeted(n).max_density for n in (600, 1200)] == [0.4, 0.2]


# --- ranks


def sample_on(group, scheme, direction, meddle=None):
    """The sample of a case, on each rank of a group."""
    with pytest.MonkeyPatch.context() as patch:
        if meddle is not None:
            meddle(group, patch)
        measured = ContextParallel(settings_of(), Team(group, group))
        world = 1 if scheme in sharded_layer.ALONE else group.size()
        case = {"world": world, "length": 600, "direction": direction, "scheme": scheme}
        return measured.measure(case)


def bad_output(group, patch):
    """Attention that is wrong on one rank."""

    def shifted(*heads, **settings):
        out, lse = distributed.zigzag_attention(*heads, **settings)
        return out + group.rank(), lse

    patch.setitem(sharded_layer.SCHEMES, "grouped", sharded_layer.Scheme(shifted))


def bad_gradient(group, patch):
    """Attention whose gradient is half of what it should be."""

    def halved(*heads, **settings):
        out, lse = distributed.zigzag_attention(*heads, **settings)
        return out / 2 + out.detach() / 2, lse

    patch.setitem(sharded_layer.SCHEMES, "grouped", sharded_layer.Scheme(halved))


@pytest.mark.parametrize(
    ("direction", "meddle", "why"),
    [
        pytest.param(FORWARD, bad_output, "^rank 1: .*wrong by .* in the output", id="output"),
        pytest.param(BOTH, bad_gradient, "wrong by 0.5 .* the gradient of q", id="gradient"),
    ],
)
def test_a_wrong_scheme_is_not_timed(ranks, direction, meddle, why):
    for sample in ranks.run(2, sample_on, "grouped", direction, meddle):
        assert sample["ms"] is None
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(sample["error"])


def no_room(group, patch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 GiB. GPU 0")

    patch.setattr(Settings, "random_heads", full)


@pytest.mark.parametrize("scheme", ["alone", "grouped"])
def test_a_text_that_does_not_fit_is_told_of(ranks, scheme):
    first = ranks.run(2, sample_on, scheme, FORWARD, no_room)[0]
    assert first["error"] == "out of memory: tried to allocate 40.00 GiB" and first["ms"] is None


def busy_alone(group):
    """(a case of one rank alone, seconds it took), that rank being busy for half a second."""

    def busy(group, patch):
        draw = Settings.random_heads

        def drawn(*given, **more):
            time.sleep(0.25)
            return draw(*given, **more)

        patch.setattr(Settings, "random_heads", drawn)

    Team(group, group).everyone(None)
    start = time.monotonic()
    return sample_on(group, "alone", FORWARD, busy), time.monotonic() - start


def test_one_rank_alone_computes_while_others_wait(ranks):
    (first, _), (second, seconds) = ranks.run(2, busy_alone)
    assert first["ms"] > 0 and first["collectives_ms"] is None
    assert second["ms"] is None and second["error"] is None
    # for what is checked, and for what is timed
    assert seconds > 0.5


def ring_backward(group, patch):
    """The engines of a GPU: their log-sum-exp has no gradient."""
    from cab_hf import engines

    patch.setattr(engines, "choose", lambda name, work: engines.FLEX)


def test_a_ring_says_why_its_gradients_are_not_timed(ranks):
    for sample in ranks.run(2, sample_on, "ring", BOTH, ring_backward):
        assert "through whose log-sum-exp no gradient flows" in sample["error"]
        assert sample["ms"] is None


class Paced(Bench):
    """A clock by which rank r takes r + 1 ms the first time, and 10 (2 - r) ms after that."""

    def __init__(self, rank):
        super().__init__("cpu")
        self.rank, self.calls = rank, 0

    def walls(self, call, runs, before=lambda: None):
        made = []
        for _ in range(runs):
            before()
            call()
            self.calls += 1
            # the first warms up
            made.append(1000.0 if self.calls == 1 else self.rank + 1.0)
            if self.calls > 2:
                made[-1] = 10.0 * (2 - self.rank)
        return made, 3.0 + self.rank


def paced(group, least, seconds):
    calls = []
    team, bench = Team(group, group), Paced(group.rank())
    return team.slowest(bench, lambda: calls.append(1), least, seconds), len(calls)


def test_the_slowest_rank_of_each_run_counts(ranks):
    # the first timed run is 2 ms by rank 1, the others 20 by rank 0
    for actual, calls in ranks.run(2, paced, 3, 0.0):
        assert (actual.ms, actual.peak_gib, actual.runs, calls) == (20.0, 4.0, 3, 4)
    # 2 ms go into 10 five times
    assert ranks.run(2, paced, 1, 0.0101)[0][0].runs == 5


def in_a_row(group, row):
    calls = []
    team, bench = Team(group, group), Paced(group.rank())
    return team.slowest(bench, lambda: calls.append(1), 3, 0.0, row), len(calls)


def warmed_up(group, warm_up):
    calls = []
    team, bench = Team(group, group), Paced(group.rank())
    return team.slowest(bench, lambda: calls.append(1), 1, warm_up=warm_up), len(calls)


def test_a_first_call_that_is_long_enough_counts(ranks):
    # it takes a second, the one behind it 2 ms by rank 1
    for warm_up, expected in ((2.0, (2.0, 2)), (0.5, (1000.0, 1)), (0.0, (1000.0, 1))):
        for actual, calls in ranks.run(2, warmed_up, warm_up):
            assert (actual.ms, calls) == expected


def test_calls_that_are_short_follow_one_another(ranks):
    # one takes 2 ms; a run of five takes 20 by rank 0
    for actual, calls in ranks.run(2, in_a_row, 5):
        assert (actual.ms, actual.runs, actual.in_a_row, calls) == (20.0 / 5, 3, 5, 2 + 3 * 5)
    # a second has room for 500
    assert ranks.run(2, in_a_row, 600)[0][0].in_a_row == 500


def together(group, failing):
    team = Team(group, group)

    def call():
        if group.rank() in failing:
            raise ValueError("no room")
        return group.rank()

    try:
        return team.together(call), team.from_rank_0(group.rank() + 5)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("failing", "actual"),
    [
        ((), [(0, 5), (1, 5)]),
        ((1,), ["rank 1: ValueError: no room"] * 2),
        ((0, 1), ["ValueError: no room"] * 2),
    ],
)
def test_a_rank_that_fails_takes_the_others_along(ranks, failing, actual):
    assert ranks.run(2, together, failing) == actual


def replayed(group, scheme):
    """(collectives of a turn, collectives of its replay)."""
    # without groups: the reference saves K and V that it repeats, and gathers none of them again
    q, k, v = (torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3))
    names = dist.all_gather_single, dist.batch_isend_irecv
    with recorded() as seen:
        out, _ = scheme(q, k, v, group=group, heads_k_stride=1, engine="reference", check=False)
        out.sum().backward()
    again = replay(seen, group, q.device)
    with recorded() as repeated:
        again()
    assert names == (dist.all_gather_single, dist.batch_isend_irecv)
    return seen, repeated


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        pytest.param(
            distributed.zigzag_attention,
            # two slices forward; backward each again, its gradients behind the one before it
            [*["all_gather_single"] * 4, *["reduce_scatter_single"] * 2],
            id="zigzag",
        ),
        pytest.param(schemes.ring_attention, ["batch_isend_irecv"] * 2, id="ring"),
    ],
)
def test_collectives_are_recorded_and_replayed(ranks, scheme, names):
    for seen, repeated in ranks.run(2, replayed, scheme):
        assert seen == repeated
        assert sorted(each.name for each in seen) == names
        # of the other rank's 256 tokens, 16 channels of K and of V of one head, or of two
        heads = 2 if len(seen) == 2 else 1
        assert {each.bytes for each in seen} == {256 * heads * 32 * 4}


# --- rows


RECORDED = {"shape": "llama3-8b", "heads_k_stride": 8, "dtype": "bfloat16", "batch": 1}
RECORDED |= {"between_gb": 50.0, "ranks_a_host": 8}
BLANK = dict.fromkeys((*ContextParallel.FOUND, "error"))


def sample(scheme, direction, length, ms, world=2, **more):
    case = {"world": world, "length": length, "direction": direction, "scheme": scheme}
    return {**BLANK, **case, "ms": ms, **more}


def link_sample(world=2, ms_a_mib=1.0):
    points = [[2**20 * n, n * ms_a_mib] for n in (1, 2, 4)]
    made = {"all-gather": points, "reduce-scatter": points}
    return sample("links", None, 0, None, world, points=made)


def rows_of(*samples, **settings):
    made = ContextParallel.rows(samples, RECORDED | settings)
    return {(r["scheme"], r["direction"], r["length"], r["world"], r["hosts"]): r for r in made}


def test_a_row_by_hand():
    rows = rows_of(
        link_sample(),
        sample("alone", FORWARD, 1024, 40.0, 1),
        sample("alone", BOTH, 1024, 120.0, 1),
        sample("grouped", FORWARD, 1024, 25.0, collectives_ms=5.0),
    )
    row = rows["grouped", FORWARD, 1024, 2, 1]
    assert (row["iterations_s"], row["alone_ms"]) == (40.0, 40.0)
    assert (row["efficiency"], row["collectives_share"]) == (0.8, 0.2)
    # half of 40 ms behind one slice: 512 tokens of 8 heads of 2 x 128 channels, two bytes each
    assert row["predicted_ms"] == pytest.approx(20 + 2)
    assert row["predicted_efficiency"] == pytest.approx(40 / 44)
    fits = rows["links", None, 0, 2, 1]["fits"]["all-gather"]
    assert fits["gb_s"] == pytest.approx(2**20 / 1e6) and fits["latency_us"] == pytest.approx(0)


def test_what_did_not_fit_on_one_rank_is_predicted_and_held_against_nothing():
    rows = rows_of(
        link_sample(),
        sample("alone", FORWARD, 1024, 40.0, 1),
        sample("alone+cab", FORWARD, 1024, 10.0, 1, choose_ms=4.0),
        sample("alone", FORWARD, 2048, None, 1, error="out of memory"),
        sample("grouped", FORWARD, 2048, 100.0),
        sample("grouped+cab", FORWARD, 2048, 100.0),
        sample("grouped+cab", FORWARD, 1024, 9.0),
    )
    first, every, *_ = ContextParallel.tables(list(rows.values())).values()
    assert "1,024" not in first and "| forward | 2,048 | 2 | grouped |" in first
    assert "| forward | 1,024 | 1 | alone |" in every
    row = rows["grouped", FORWARD, 2048, 2, 1]
    assert row["efficiency"] is None and row["alone_ms"] is None
    # 160 ms by N², halved, and 4 MiB
    assert row["predicted_ms"] == pytest.approx(80 + 4)
    # a budget may be another one at another length
    assert rows["grouped+cab", FORWARD, 2048, 2, 1]["predicted_ms"] is None
    # both ranks choose for the whole text
    assert rows["grouped+cab", FORWARD, 1024, 2, 1]["predicted_ms"] == pytest.approx(4 + 6 / 2 + 2)


def test_other_places_are_foreseen():
    rows = rows_of(
        link_sample(2, ms_a_mib=8.0),
        link_sample(4, ms_a_mib=0.001),
        sample("alone", FORWARD, 8192, 640.0, 1),
        sample("grouped", FORWARD, 8192, 400.0, 2),
        sample("grouped", FORWARD, 8192, 200.0, 4),
    )
    places = [(r["world"], r["hosts"]) for r in rows.values() if not r["measured"]]
    assert places == [(8, 1), (4, 2), (8, 2), (16, 2), (8, 4), (16, 4)]
    assert rows["grouped", FORWARD, 8192, 2, 1]["predicted_ms"] == pytest.approx(320 + 8 * 16)
    # the links of four ranks, the most there were: seven times 4 MiB
    assert rows["grouped", FORWARD, 8192, 8, 1]["predicted_ms"] == pytest.approx(80.028)
    text = shown(ContextParallel, list(rows.values()))
    assert (
        "| forward | 8,192 | grouped | 80.0, 100.0 % | 161, 99.7 % |" in text
        and "| 8 ranks, 2 hosts |" in text
    )
    # between hosts 50 GB/s: 15 times 2 MiB
    slow = 15 * 2**21 / 50e6
    assert rows["grouped", FORWARD, 8192, 16, 2]["predicted_ms"] == pytest.approx(40 + slow)


def test_without_links_nothing_is_foreseen():
    rows = rows_of(
        sample("links", None, 0, None, error="no network"),
        sample("alone", FORWARD, 1024, 40.0, 1),
        sample("grouped", FORWARD, 1024, 25.0),
    )
    assert all(row["measured"] and row["predicted_ms"] is None for row in rows.values())
    text = shown(ContextParallel, list(rows.values()))
    assert "| not measured | no network | 0 | links on 2 |" in text


def test_tables_and_figure_of_what_failed(tmp_path):
    rows = list(
        rows_of(
            link_sample(),
            sample("alone", BOTH, 1024, None, 1, error="out of memory"),
            sample("ring", BOTH, 1024, None, error="no gradient flows"),
            sample("grouped", BOTH, 1024, 25.0, ran_as="flex (FLASH)", peak_gib=1.5),
        ).values()
    )
    text = shown(ContextParallel, rows)
    assert "| forward+backward | 1,024 | 2 | ring | – | – | – |" in text
    assert "| forward+backward | not measured | no gradient flows | 1,024 | ring on 2 |" in text
    assert ContextParallel.readings(rows) == []
    ContextParallel.draw(tmp_path / "figure.png", rows)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


class Sized(Team):
    """A team of so many ranks."""

    size = None

    def __init__(self, size):
        super().__init__()
        object.__setattr__(self, "size", size)


def test_a_folder_may_hold_runs_of_several_numbers_of_ranks():
    assert named("speed context-parallel") is ContextParallel
    few, many = (ContextParallel(settings_of(), Sized(size)) for size in (2, 8))
    assert few.identity() == many.identity()
    assert few.recorded()["worlds"] == [2]
    result = experiment.command(ContextParallel, {"worlds": [2, 8], "device": "cpu"})
    name = "cab_hf.eval speed context-parallel --device cpu"
    assert result.splitlines()[1:-1] == [f"torchrun --nproc_per_node={n} -m {name}" for n in (2, 8)]


def test_one_rank_measures_what_more_are_held_against(one_process, tmp_path):
    out = tmp_path / "run"
    settings = settings_of(out=str(out), schemes=("grouped", "grouped+cab"))
    ContextParallel(settings, Team(dist.group.WORLD)).over_ranks()
    results = json.loads((out / "results.json").read_text())
    assert results["provenance"]["settings"]["worlds"] == [1]
    actual = [(row["scheme"], row["direction"]) for row in results["rows"]]
    assert sorted(actual) == sorted(
        (name, way) for name in sharded_layer.ALONE for way in (FORWARD, BOTH)
    )
    assert all(row["ms"] > 0 for row in results["rows"])
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "report.md").read_text()
    assert "torchrun --nproc_per_node=1 -m" in text and "## Links" not in text
    # and the others go on from there
    more = ContextParallel(settings, Sized(2))
    assert [case for case in more.cases(()) if case["world"] == 1] == [
        {"world": 1, "length": 600, "direction": way, "scheme": name}
        for name in sharded_layer.ALONE
        for way in (FORWARD, BOTH)
    ]


def test_a_long_text_is_warmed_up_by_a_shorter_one(monkeypatch):
    monkeypatch.setattr("cab_hf.eval.speed.context_parallel.WARM_UP_TOKENS", 256)
    seen = []
    attend = sharded_layer.BenchCase.attend

    def watched(self, q, k, v):
        seen.append(self.length)
        return attend(self, q, k, v)

    monkeypatch.setattr(sharded_layer.BenchCase, "attend", watched)
    measured = ContextParallel(settings_of(), Team())
    case = {"world": 1, "length": 600, "direction": FORWARD, "scheme": "alone"}
    assert measured.measure(case)["error"] is None
    # checked, warmed up, called once more since it takes no seconds, how many, timed
    assert seen[:3] == [4 * 128 - 37, 256, 600] and set(seen[2:]) == {600}
    # CAB compiles for every length
    seen.clear()
    assert measured.measure({**case, "scheme": "alone+cab"})["error"] is None
    assert set(seen) == {4 * 128 - 37, 600}


def test_collectives_are_those_of_the_first_call():
    calls = []
    call, result = noted(lambda: calls.append(1) or len(calls))
    assert (call(), call()) == (1, 2) and result == []
