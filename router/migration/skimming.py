"""Events in the middle of things, which are recognised and not decoded.

Nearly every event of a stream is written like the one before it and differs in text and ids (or the
count of tokens) only. Once such a plain event was read the general way, what it has around these is
its `Form`; from then on an event that is of the same form, to the last byte, is skimmed: what it
brings is noted as it stands there. Nothing is guessed: an event that differs anywhere else goes the
general way, and both ways leave the same record and the same bytes for the client.
"""

from __future__ import annotations

import re
from functools import lru_cache

from attrs import frozen

from router.migration.agreement import releases_all
from router.migration.asking import Asking
from router.migration.noting import Noting
from router.migration.record import Record

# All repetition is possessive: what matches can match in one way only.
_NUMBER = rb"(?:0|[1-9]\d{0,17}+)"
#: What needs no escape in a string, and the commonest escapes.
_PLAIN_CHARACTERS = rb"[ !#-\[\]-\x7f]*+"
_ESCAPE = rb'\\["\\bfnrt]'
#: Characters of several bytes, as Unicode's table of well-formed UTF-8 has them.
_WIDE = (
    rb"[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}"
    rb"|\xed[\x80-\x9f][\x80-\xbf]|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}"
    rb"|\xf4[\x80-\x8f][\x80-\xbf]{2}"
)
#: It is not empty.
_TEXT = rb'(?!")(%b(?:(?:%b|%b)%b)*+)' % (_PLAIN_CHARACTERS, _ESCAPE, _WIDE, _PLAIN_CHARACTERS)
#: What is kept of ids: the list without the bracket that closes it.
_IDS = rb',"token_ids":(\[%b(?:,%b)*+)\]' % (_NUMBER, _NUMBER)
#: What is kept of usage: how many tokens were generated.
_USAGE = (
    rb',"usage":\{"prompt_tokens":%b,"total_tokens":%b,"completion_tokens":(%b)'
    rb'(?:,"prompt_tokens_details":null)?+(?:,"reasoning_tokens":%b)?+'
    rb'(?:,"completion_tokens_details":null)?+\}'
) % (_NUMBER, _NUMBER, _NUMBER, _NUMBER)
_NULL = rb'(?:,"(?:logprobs|finish_reason|stop_reason|matched_stop|prompt_token_ids)":null)'
_NO_IDS = rb',"token_ids":null'
_NULL_AFTER = rb'(?:,"(?:usage|prompt_token_ids|prompt_text)":null)'
#: A plain event: what is around its text, its ids and its usage, as vLLM 0.32 and SGLang 0.5.23
#: write chat and completions.
_PLAIN = re.compile(
    rb'(?P<opening>"choices":\[\{"index":0,(?:"delta":\{(?:"reasoning_content":null,)?+"content"'
    rb'|(?P<is_text>"text")):")%b(?P<middle>"(?(is_text)|\})%b*+(?:%b)?+)(?P<ids>%b)?+'
    rb"(?P<rest>%b*+\}\]%b*+)(?P<usage>%b)?+\}\n\n"
    % (_TEXT, _NULL, _NO_IDS, _IDS, _NULL, _NULL_AFTER, _USAGE)
)


@frozen
class Form:
    """What is around the text and the mark (ids, or else a count) of a plain event."""

    opening: bytes
    middle: bytes
    has_ids: bool
    rest: bytes
    has_usage: bool

    def compile(self) -> re.Pattern[bytes]:
        """Matches from after the opening to the end of an event; its groups are text and mark."""
        ids = _IDS if self.has_ids else b""
        usage = _USAGE if self.has_usage else b""
        mark = b"" if self.has_ids or self.has_usage else b"()"
        middle, rest = re.escape(self.middle), re.escape(self.rest)
        return re.compile(b"".join((_TEXT, middle, ids, rest, usage, mark, rb"\}\n\n")))


def _form_of(event: bytes, start: int) -> Form | None:
    """The form of an event from its choices on; None where it is no plain one."""
    found = _PLAIN.fullmatch(event, start)
    if found is None or (found["ids"] and found["usage"]):
        return None  # where there are both, the engine's count has to be compared with the ids
    has_ids, has_usage = found["ids"] is not None, found["usage"] is not None
    return Form(found["opening"], found["middle"], has_ids, found["rest"], has_usage)


#: Looking for a number in bytes is many times faster than looking for a byte.
_COMMA = ord(",")
#: Events between two tries to learn a form, at most.
_PATIENCE_MAX = 32
#: There are as many forms as engines have ways to write.
_compiled = lru_cache(maxsize=64)(Form.compile)


class Skimming(Noting):
    """Notes plain events from their bytes, once it has learned their form."""

    __slots__ = (
        "_is_counted",
        "_is_ids",
        "_match",
        "_own",
        "_shown",
        "_tail",
        "_tries",
        "asking",
        "forward",
        "patience",
        "skims",
    )

    def __init__(self, record: Record, engine: str, asking: Asking, *, is_fresh: bool) -> None:
        super().__init__(record, engine, is_fresh=is_fresh)
        self.asking = asking
        #: What to send to the client for the event that was read last.
        self.forward = b""
        #: The form of plain events is known.
        self.skims = False
        #: How they begin, up to their text, here and for the client.
        self._own = self._shown = b""
        #: How they end for the client, after their text; None: with what stands there.
        self._tail: bytes | None = None
        #: The rest of them; its groups are text and mark.
        self._match = _PLAIN.fullmatch
        #: What the mark is, if there is one.
        self._is_ids = self._is_counted = False
        #: Events to pass before the next try to learn, and how many tries there were.
        self.patience = self._tries = 0

    def lose_patience(self) -> None:
        """Each try to learn lets more events pass before the next."""
        self._tries = self.patience = min(self._tries + 1, _PATIENCE_MAX)

    def learn(self, event: bytes, own: bytes, shown: bytes, *, is_resumed: bool) -> None:
        """Skim what is of the form of this event, which was just read, if it is a plain one.

        `own` and `shown`: how events begin, up to their choices, here and for the client.
        """
        form = _form_of(event, len(own)) if event.startswith(own) else None
        if form is None or (form.has_usage and not self._may_skim_usage(is_resumed=is_resumed)):
            return
        self.skims = True
        self._own = own + form.opening
        self._shown = self._own if own == shown else shown + form.opening
        self._match = _compiled(form).fullmatch
        self._is_ids, self._is_counted = form.has_ids, form.has_usage
        self._tail = self._tail_of(form)

    def _may_skim_usage(self, *, is_resumed: bool) -> bool:
        """Whether the prompt is known, and usage is to be taken out or is the client's as it is."""
        is_known = self.record.prompt_tokens is not None or not self._is_fresh
        return is_known and (self.asking.usage or not is_resumed)

    def _tail_of(self, form: Form) -> bytes | None:
        """What was asked for here is null where the engine writes null, else it is not there."""
        if not (self.asking.ids if form.has_ids else form.has_usage and self.asking.usage):
            return None
        ids = b',"token_ids":null' if form.has_ids and self._is_vllm else b""
        writes_null = not self._is_vllm and not self._is_chat
        usage = b',"usage":null' if form.has_usage and writes_null else b""
        return b"".join((form.middle, ids, form.rest, usage, b"}\n\n"))

    def skim(self, event: bytes) -> bool:
        """Read a raw event that is complete and of the known form; any other is left unread."""
        own = self._own
        if not event.startswith(own):
            return False
        found = self._match(event, len(own))
        if found is None:
            return False
        text, mark = found.groups()
        record = self.record
        if record.is_exact:
            if not self._note_exact(text, mark):
                return False
        elif record.poison is None and not self._note_text(text, mark):
            return False
        if self._tail is not None:
            self.forward = self._shown + text + self._tail
        else:
            self.forward = event if own is self._shown else self._shown + event[len(own) :]
        self.events += 1
        return True

    # What an event brings is noted as `_note` does it; False where that must be left to `_note`.

    def _note_exact(self, text: bytes, ids: bytes) -> bool:
        record = self.record
        more = ids.count(b",") if _COMMA in ids else 0
        tokens = record.tokens + 1 + more
        if not self._is_ids or tokens > record.room:
            return False
        record.tokens = record.tokens_at_text = tokens
        record.ids_json += ids
        record.text_json += text
        if not more and self._proves and (self._is_vllm or releases_all(text.decode())):
            record.agreed_ids_json = len(record.ids_json)
            record.agreed_text_json = len(record.text_json)
        return True

    def _note_text(self, text: bytes, mark: bytes) -> bool:
        record = self.record
        if self._is_ids:
            tokens = record.tokens + 1 + mark.count(b",")
        elif self._is_counted:
            tokens = self.base + int(mark)
        else:
            return False
        if record.is_kept:
            if tokens > record.room:
                return False
            record.text_json += text
        record.tokens = record.tokens_at_text = tokens
        return True
