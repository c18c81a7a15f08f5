"""Text from a model that is larger than memory: its weights stream from memory and disk, token by token.

pip install '.[transformers]', then: python examples/generate.py MODEL_FOLDER DIRECTORY_ON_NVME [PROMPT]
"""

import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer

import zero_offload as zo

folder, directory, prompt = [*sys.argv[1:], "Once upon a time"][:3]
tokenizer = AutoTokenizer.from_pretrained(folder)
with zo.deferred_init(values="skip"):  # shapes alone
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
zo.load_pretrained(model, folder)  # checks the folder
model.eval().requires_grad_(False)  # before zo.offload: nothing is trained, so there are no optimizer states
zo.offload(model, zo.OffloadConfig(params="nvme", nvme=directory, durability="scratch"))

inputs = tokenizer(prompt, return_tensors="pt").to(zo.device(model))
before, start = zo.stats(model), time.perf_counter()
with torch.no_grad():
    out = model.generate(**inputs, max_new_tokens=32, do_sample=False, streamer=TextStreamer(tokenizer))
seconds, num_tokens = time.perf_counter() - start, out.shape[1] - inputs["input_ids"].shape[1]
read = zo.stats(model).read_bytes["nvme"] - before.read_bytes["nvme"]
print(f"{num_tokens / seconds:.2f} tokens/s, {read / num_tokens / 1e6:.2f} MB read for each")
zo.close(model)
