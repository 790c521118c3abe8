"""One prompt, run once, with two continuations: python examples/transformers_shared_prompt.py FOLDER_OR_HUB_ID"""

import copy
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcore.integrations.transformers import KVCache, cache_argument

if len(sys.argv) != 2:
    sys.exit(__doc__)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="kvcore").eval()

shared = "A short guide to the rivers of Europe. "
cache = KVCache(model.config, "int8-turbo4")
with torch.no_grad():
    model(**tokenizer(shared, return_tensors="pt"), **{cache_argument(): cache})

for question in ("The longest river is", "The river in Paris is"):
    inputs = tokenizer(shared + question, return_tensors="pt")
    given = {cache_argument(): copy.deepcopy(cache)}
    out = model.generate(**inputs, **given, max_new_tokens=8, do_sample=False)
    print(tokenizer.decode(out[0, -8:]))
