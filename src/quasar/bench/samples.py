"""Prompts that come with the program: `quasar demo` answers them, `quasar doctor` reads them."""

from __future__ import annotations

from quasar.bench.suites import Prompt
from quasar.text.tokenizer import Tokenizer

EDIT = """\
Rename the variable `total` to `weight` in this function and change nothing else. \
Answer with the whole function.

def average_weight(parcels):
    total = 0.0
    count = 0
    for parcel in parcels:
        if parcel.weight is None:
            continue
        total = total + parcel.weight
        count = count + 1
    if count == 0:
        return 0.0
    return total / count"""

SUMMARY = """\
Summarise the following report in three sentences, in its own words where you can.

The harbour bridge was closed on Tuesday evening after an inspector found a crack in one of the \
steel beams that carry the northern lane. The city council said that the crack is two metres long \
and that it had not been there at the last inspection in March. Buses that use the bridge are sent \
through the old tunnel, and ferries run every ten minutes until midnight. The council expects the \
repair to take three weeks, because a new beam has to be made to measure. Cyclists and people on \
foot can still use the southern walkway. The council asked drivers to leave their cars at the \
station, where parking is free until the bridge is open again."""

EXTRACT = """\
Copy every line of this log that contains the word ERROR, exactly as it stands.

09:14:02 INFO  server started on port 8080
09:14:07 ERROR cannot open settings.toml: no such file
09:14:07 INFO  default settings are used
09:15:31 WARN  slow request: 2.4 seconds
09:16:12 ERROR database connection lost: timeout after 30 seconds
09:16:13 INFO  trying again
09:16:44 ERROR database connection lost: timeout after 30 seconds"""

CODE = """\
Write a Python function `is_palindrome(text)` that ignores case and everything that is not a \
letter, and three assertions that test it."""

MATHS = """\
A baker makes 48 rolls an hour. She works from six until ten, and a quarter of the rolls are \
eaten by the staff. She sells the others for 0.75 each. How much money does she take? Think step \
by step."""

CHAT = "I slept badly and have a long day ahead. What are three small things that could help me?"

TRANSLATION = """\
Translate into French: The train leaves at eight in the morning. The train from Lyon arrives at \
nine in the morning. The train to Paris leaves at ten in the morning."""

STORY = "Write the first paragraph of a story about a lighthouse keeper who finds a letter."

PROMPTS = tuple(
    Prompt(category, category, text)
    for category, text in {
        "edit": EDIT,
        "summary": SUMMARY,
        "extraction": EXTRACT,
        "code": CODE,
        "maths": MATHS,
        "chat": CHAT,
        "translation": TRANSLATION,
        "story": STORY,
    }.items()
)


def text_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """`count` tokens of these texts, over and over."""
    text = "\n\n".join(prompt.text for prompt in PROMPTS)
    once = tokenizer.encode(text, add_special_tokens=False)
    return (once * (count // len(once) + 1))[:count]
