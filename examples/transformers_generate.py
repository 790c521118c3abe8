"""transformers with a turbo4 cache: python examples/transformers_generate.py FOLDER_OR_HUB_ID [MODE]"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcore.integrations.transformers import KVCache, cache_argument

if len(sys.argv) not in (2, 3):
    sys.exit(__doc__)
path, mode = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "turbo4"
tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="kvcore").eval()

# Two prompts of different lengths: the shorter one is padded on the left.
inputs = tokenizer(["Three rivers of France are", "The sea is"], return_tensors="pt", padding=True)
cache = KVCache(model.config, mode)
out = model.generate(**inputs, **{cache_argument(): cache}, max_new_tokens=12, do_sample=False)
for text in tokenizer.batch_decode(out, skip_special_tokens=True):
    print(text)
print(cache.stats())
