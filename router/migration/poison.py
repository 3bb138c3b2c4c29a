"""Why a stream may not move once content was delivered: a closed list, each with its reason.

A poisoned stream keeps flowing untouched and ends visibly when its worker is lost. Every member
says what would be wrong with going on; a member without such a sentence does not belong here.
Restarting the original request is no continuation: it stays possible for every shape while the
client has nothing but preamble.
"""

from __future__ import annotations

from enum import Enum


class Poison(Enum):
    """One reason; `value` is the metric label, `why` the documentation."""

    why: str

    def __new__(cls, label: str, why: str) -> Poison:
        self = object.__new__(cls)
        self._value_ = label
        self.why = why
        return self

    # Of the request.
    SEVERAL_CHOICES = (
        "several_choices",
        "each choice would need a prefix of its own, and one request carries one prefix",
    )
    BEAM_SEARCH = (
        "beam_search",
        "the beams that were not shown are lost with their engine, so the search cannot go on",
    )
    BATCH_PROMPT = (
        "batch_prompt",
        "a list of prompts is several generations, of which only some may be broken",
    )
    PROMPT_EMBEDS = (
        "prompt_embeds",
        "a prompt given as embeddings cannot be followed by ids or text",
    )
    SUFFIX = (
        "suffix",
        "the text before the suffix would end elsewhere, so the model would fill another gap",
    )
    STRUCTURED_OUTPUT = (
        "structured_output",
        "every engine starts a grammar at its root, whatever prefix it is given",
    )
    TOOL_CHOICE = (
        "tool_choice",
        "a required, named or strict tool is a grammar too, and would start again at its root",
    )
    ECHO = (
        "echo",
        "the prompt would be part of the carried text and be repeated a second time",
    )
    NO_GENERATION = (
        "no_generation",
        "a budget of nothing asks for no output, so there is nothing to go on with",
    )
    HIDDEN_REASONING = (
        "hidden_reasoning",
        "tokens that are withheld or budgeted by a parser are unknown here and cannot be carried",
    )
    HARMONY = (
        "harmony",
        "its channels are parsed by the engine, and a prefix cannot say in which one it ends",
    )
    SPECIAL_TOKENS = (
        "special_tokens",
        "special tokens shown as text are read back as control tokens or as other tokens",
    )
    WHOLE_ANSWER_EXTRAS = (
        "whole_answer_extras",
        "data about the whole generation was asked for, and the next engine saw only a part",
    )
    STOP_REGEX = (
        "stop_regex",
        "a match that begins before the break and ends after it would not be seen by anybody",
    )
    SERVER_SESSION = (
        "server_session",
        "part of the prompt is kept in a session of the engine that is gone",
    )
    MALFORMED = (
        "malformed",
        "a field has a form that engines may read differently, so what was asked is not known",
    )

    # Of the request, where only token ids could be carried and there are none.
    TOKEN_PROMPT = (
        "token_prompt",
        "the prompt was given as token ids and the output is only known as text",
    )
    TRUNCATED_PROMPT = (
        "truncated_prompt",
        "truncating prompt and carried text together would cut off more of the prompt",
    )
    OPEN_PROMPT = (
        "open_prompt",
        "no chat message can stand for text that follows the prompt without a turn of its own",
    )

    # Of the stream.
    TOOL_CALL = (
        "tool_call",
        "the engine's parser is inside a call, and no request can put another one there",
    )
    REASONING = (
        "reasoning",
        "delivered thoughts cannot be handed over as thoughts, and as content they are no answer",
    )
    OTHER_CONTENT = (
        "other_content",
        "something other than text was delivered, and nobody can carry what cannot be read",
    )
    UNREADABLE = (
        "unreadable",
        "an event was delivered that nobody can read, so what the client has is not known",
    )
    SHOWN_TOKENS = (
        "shown_tokens",
        "the client was shown tokens of text that it was not given, and text read back by another"
        " worker would not bring the same ones again",
    )
    UNCOUNTED = (
        "uncounted",
        "the engine tells neither ids nor usage, so what is left of the budget is not known",
    )
