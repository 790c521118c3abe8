"""One choice of an answer while it comes: what can be shown, and how it ended."""

from __future__ import annotations

from kvcore.engine.types import Output, TokenLogprob, Usage
from kvcore.server.errors import failure
from kvcore.server.logprobs import Aligner, Placed, place_prompt
from kvcore.server.prepare import Plan
from kvcore.server.served import Served


class Choice:
    """Feed it with `take`; ``finish_reason`` is None until the end."""

    def __init__(self, plan: Plan, served: Served, index: int) -> None:
        self.index = index
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self._plan, self._tokenizer = plan, served.tokenizer
        self._request = plan.requests[index]
        self._echo = None if plan.echo is None else plan.echo[index]
        self._prompt_left = len(self._request.prompt) if self._request.echo_logprobs else 0
        self._prompt_tokens: list[TokenLogprob] = []
        self._aligner = Aligner(served.tokenizer, len(self._echo or ""))

    def take(self, output: Output) -> tuple[str, list[Placed]]:
        """The text and the tokens that ``output`` adds. ApiError where the engine gave the request up."""
        self.usage = output.usage
        if output.finish_reason in ("error", "cancelled"):
            raise failure(output)
        tokens = list(output.tokens)
        if self._prompt_left:
            self._prompt_tokens += tokens[: self._prompt_left]
            count = len(tokens)
            tokens = tokens[self._prompt_left :]
            self._prompt_left -= min(count, self._prompt_left)
        text, placed = self._prompt(output)
        if not self._plan.prompt_only:
            text += output.text
            if self._plan.logprobs is not None:
                placed += self._aligner.push(tokens, output.text)
                placed += self._aligner.rest() if output.finish_reason == "length" else []
        self.finish_reason = "length" if output.finish_reason and self._plan.prompt_only else output.finish_reason
        return text, placed

    def _prompt(self, output: Output) -> tuple[str, list[Placed]]:
        """The prompt's text and tokens, once: when all its log-probabilities are there, and the answer begins."""
        begins = bool(output.text or output.finish_reason or output.usage.completion_tokens)
        if self._echo is None or self._prompt_left or not begins:
            return "", []
        text, self._echo = self._echo, None
        return text, place_prompt(self._prompt_tokens, text, self._tokenizer)
