"""Makes a model of about a million parameters out of nothing but the Python installation.

    python tiny_model.py FOLDER

Runs inside an engine's environment, which has torch and transformers, and imports nothing of ours.
The tokenizer is learnt from the standard library's source. Weights are random but drawn wide, so
that every next token depends on the whole prompt: a lost, doubled or altered byte on the way to the
engine changes all that follows. Float32 and greedy, so that engines agree with each other.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

UNKNOWN, START, STOP, TURN, TURN_END = SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
)
VOCABULARY, CONTEXT = 2048, 4096
HIDDEN, LAYERS, HEAD = 128, 2, 64
EMBEDDING_SPREAD, WEIGHT_GAIN = 0.5, 1.5
LEARNT_FILES = 120
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:LEARNT_FILES]
    pairs.train([str(path) for path in sources], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=pairs,
        unk_token=UNKNOWN,
        bos_token=START,
        eos_token=TURN_END,
        additional_special_tokens=[TURN],
        model_max_length=CONTEXT,
        chat_template=TEMPLATE,
    )


def model(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HIDDEN // HEAD,
            num_key_value_heads=HIDDEN // HEAD,
            head_dim=HEAD,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            bos_token_id=SPECIAL.index(START),
            eos_token_id=SPECIAL.index(TURN_END),
            pad_token_id=SPECIAL.index(UNKNOWN),
        )
    ).float()
    with torch.no_grad():
        for name, weights in llama.named_parameters():
            if weights.dim() == 2:
                wide = (
                    EMBEDDING_SPREAD if "embed" in name else WEIGHT_GAIN / weights.shape[1] ** 0.5
                )
                weights.normal_(0, wide)
    return llama


def main() -> None:
    folder = Path(sys.argv[1])
    words = tokenizer()
    words.save_pretrained(folder)
    llama = model(len(words))
    llama.generation_config.eos_token_id = SPECIAL.index(TURN_END)
    llama.save_pretrained(folder)


if __name__ == "__main__":
    main()
