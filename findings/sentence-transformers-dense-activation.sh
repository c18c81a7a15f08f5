#!/bin/sh
# sentence-transformers 6.2.0, SentenceTransformer.save_pretrained: a `Dense` module whose activation has arguments
# gives other embeddings after a load.
#
# `Dense.get_config_dict` (sentence_transformers/base/modules/dense.py) saves the name of the activation's class, and
# `Dense.load` calls that class without arguments: `LeakyReLU(0.5)` comes back as `LeakyReLU()`, whose slope is 0.01.
# Nothing warns. One would expect the same embeddings, or an error at the save. The documentation of
# `activation_function` takes any activation and names no limit. `PReLU` is exact, for its slope is a weight.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 sentence-transformers==6.2.0 transformers==5.23.0 tokenizers==0.23.3
cd "$work"
HF_HUB_OFFLINE=1 "$venv/bin/python" -W ignore - 2>"$work/messages" <<'PY' || { cat "$work/messages" >&2; exit 1; }
import sys, sentence_transformers, torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

print("torch", torch.__version__, "sentence-transformers", sentence_transformers.__version__)
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "blue", "small", "large"]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained("base")
torch.manual_seed(0)
BertModel(
    BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
).save_pretrained("base")
texts = ["small red", "large green blue", "blue", "small large red green"]


def difference(activation, folder):
    """The largest difference of an embedding after a save and a load."""
    torch.manual_seed(0)
    model = SentenceTransformer(
        modules=[Transformer("base"), Pooling(16), Dense(16, 8, activation_function=activation)], device="cpu"
    )
    model.save_pretrained(folder)
    loaded = SentenceTransformer(folder, device="cpu")
    before, after = (each.encode(texts, convert_to_tensor=True) for each in (model, loaded))
    return (before - after).abs().max().item()


holds = True
for number, (activation, exact) in enumerate(
    (
        (torch.nn.Tanh(), True),
        (torch.nn.LeakyReLU(), True),
        (torch.nn.PReLU(init=0.5), True),
        (torch.nn.LeakyReLU(0.5), False),
        (torch.nn.ELU(0.25), False),
        (torch.nn.Softplus(beta=4), False),
        (torch.nn.GELU(approximate="tanh"), False),
    )
):
    found = difference(activation, f"saved-{number}")
    print(f"{activation}: embeddings differ by {found:.2g}")
    holds &= found < 1e-6 if exact else found > 1e-5
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
