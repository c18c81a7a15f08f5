#!/bin/sh
# lm-eval 0.4.13, HFLM.loglikelihood_rolling: with a tokenizer that begins texts with BOS, the perplexity counts BOS as
# a token to be predicted, after another BOS.
#
# `loglikelihood_rolling` (lm_eval/models/huggingface.py) encodes the text with the tokenizer's own special tokens,
# and `get_rolling_token_windows` puts `prefix_token_id`, which is BOS, in front of that. So each text costs
# -log p(BOS | BOS) more, and the model sees two of them. One would expect the log likelihood of the text's tokens
# after one BOS, as `loglikelihood` gives it and as a tokenizer without BOS or `add_bos_token=False` gives it.
# The docstring shows one BOS as the prefix, from which the text's tokens are predicted. Upstream: issue 3333, closed.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 lm-eval==0.4.13 transformers==5.23.0 accelerate==1.15.0 peft==0.21.2 tokenizers==0.23.3
cd "$work"
export HF_HUB_OFFLINE=1 HF_HOME="$work"
"$venv/bin/python" -W ignore - 2>"$work/messages" <<'PY' || { cat "$work/messages" >&2; exit 1; }
import sys, importlib.metadata, torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

print("torch", torch.__version__, "lm-eval", importlib.metadata.version("lm-eval"))
words = ["<pad>", "<s>", "</s>", "<unk>", "red", "green", "blue", "small", "large"]
text = "small red large green blue"


def tokenizer(bos):
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.5,
    )
).eval()


def by_hand(tokens):
    """The log likelihood of all tokens but the first."""
    with torch.no_grad():
        scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return sum(scores[place, token].item() for place, token in enumerate(tokens[1:]))


def rolling(bos, **options):
    evaluated = HFLM(pretrained=model, tokenizer=tokenizer(bos), batch_size=1, device="cpu", **options)
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    return evaluated.loglikelihood_rolling([request], disable_tqdm=True)[0]


tokens = [words.index(word) for word in text.split()]
expected, doubled = by_hand([1, *tokens]), by_hand([1, 1, *tokens])
found, without, turned_off = rolling(True), rolling(False), rolling(True, add_bos_token=False)
print(f"by hand: the text after one BOS {expected:.3f}; BOS and the text after one BOS {doubled:.3f}")
print(f"loglikelihood_rolling, tokenizer with BOS: {found:.3f}; with add_bos_token=False: {turned_off:.3f}")
print(f"loglikelihood_rolling, tokenizer without BOS: {without:.3f}")


def near(left, right):
    return abs(left - right) < 1e-3


holds = near(found, doubled) and not near(found, expected) and near(without, expected) and near(turned_off, expected)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
