"""Tiny tokenizers for needle tests, and a tiny saved model with a tokenizer."""

from tiny import make_tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cab_hf.data import needles

PROSE_TEXT = (
    'It rained all day. The old town slept! "Who goes there?" asked nobody. So it was, and so.'
)
CHAT_TEMPLATE = (
    "{% for message in messages %}user : {{ message['content'] }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def make_tokenizer(chat_template=None):
    """Return a word-level tokenizer of the words in needle tests, with a token for each digit."""
    source_texts = [
        *needles.NOISE_SENTENCES,
        *needles.DISTRACTOR_TEMPLATES,
        *needles.PERSON_NAMES,
        needles.INSTRUCTION_TEMPLATE,
        needles.KEY_STATEMENT_TEMPLATE,
        needles.QUESTION_TEMPLATE,
        needles.KEY_REPETITION_TEMPLATE,
        PROSE_TEXT,
        "are important pass keys is an them it for user assistant end : 0 1 2 3 4 5 6 7 8 9",
    ]
    pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    words = {
        word
        for source_text in source_texts
        for word, _ in pre_tokenizer.pre_tokenize_str(source_text)
    }
    vocabulary = {
        word: token_id for token_id, word in enumerate(["<unk>", "<eos>", *sorted(words)])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        pad_token="<eos>",
        chat_template=chat_template,
    )


def make_merging_tokenizer():
    """Return a byte-level BPE tokenizer with a BOS token; tokens of words start with a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    number_sentences = [f"The number is {number}." for number in range(10_000, 100_000, 991)]
    trainer_options = {"vocab_size": 600, "special_tokens": ["<s>"], "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **trainer_options)
    tokenizer.train_from_iterator([*needles.NOISE_SENTENCES, *number_sentences], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def save_llama(folder):
    """Save a tiny LLaMA of two layers and its tokenizer in ``folder``; return the folder."""
    tokenizer = make_tokenizer()
    vocabulary_fields = {"vocab_size": len(tokenizer), "eos_token_id": 1, "pad_token_id": 1}
    make_tiny_model(num_hidden_layers=2, **vocabulary_fields).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
