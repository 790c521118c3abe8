"""A prompt's cache in a file, and back: python examples/mlx_lm_saved_prompt.py FOLDER_OR_HUB_ID FILE.safetensors"""

import sys

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from kvcore.integrations.mlx_lm import make_prompt_cache, patched

if len(sys.argv) != 3:
    sys.exit(__doc__)
path, file = sys.argv[1:]
model, tokenizer = mlx_lm.load(path)
with patched(model):
    cache = make_prompt_cache(model, "int8-turbo4")
    model(mx.array([tokenizer.encode("A short guide to the rivers of Europe. ")]), cache=cache)
    save_prompt_cache(file, cache)
    print(mlx_lm.generate(model, tokenizer, "The longest is", max_tokens=8, prompt_cache=load_prompt_cache(file)))
