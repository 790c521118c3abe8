"""mlx-lm with kvcore's cache: python examples/mlx_lm_generate.py FOLDER_OR_HUB_ID [MODE]"""

import sys

import mlx_lm

from kvcore.integrations.mlx_lm import patched

if len(sys.argv) not in (2, 3):
    sys.exit(__doc__)
path, mode = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "turbo4"
model, tokenizer = mlx_lm.load(path)
with patched(model, mode):
    for piece in mlx_lm.stream_generate(model, tokenizer, "Three rivers of France are", max_tokens=12):
        print(piece.text, end="", flush=True)
print()
