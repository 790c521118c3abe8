"""An OpenAI-compatible HTTP server over the engine: `kvcore serve`.

Needs the extra ``server`` (fastapi, uvicorn, pydantic, prometheus-client). Nothing outside imports this package before
that command runs.
"""
