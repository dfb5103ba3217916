"""Prompts that come with the program: `quasar demo` answers them, `quasar doctor` reads them."""

from __future__ import annotations

from quasar.bench.suites import Prompt
from quasar.text.tokenizer import Tokenizer

CORRECTION = """\
Fix the spelling mistakes in this text and write the whole corrected text:

Last sumer we went to the mountains with my granparents. We stayed in a small wooden house near \
a lake. Every morning my granfather made pancakes and we ate them on the terrace. In the \
afternoon we went swiming in the lake or walked in the forest. On the last day we saw a deer near \
the house."""

REWRITING = """\
Rewrite this text in the past tense:

Every day Anna walks to the market. She buys bread, cheese and apples. She talks with the baker \
about the weather. Then she walks home along the river. She sits on the balcony and reads a book \
until the sun goes down."""

SUMMARY = """\
Summarise the following report in three sentences, in its own words where you can.

The harbour bridge was closed on Tuesday evening after an inspector found a crack in one of the \
steel beams that carry the northern lane. The city council said that the crack is two metres long \
and that it had not been there at the last inspection in March. Buses that use the bridge are sent \
through the old tunnel, and ferries run every ten minutes until midnight. The council expects the \
repair to take three weeks, because a new beam has to be made to measure. Cyclists and people on \
foot can still use the southern walkway. The council asked drivers to leave their cars at the \
station, where parking is free until the bridge is open again."""

READING = """\
Read the passage and answer the question by quoting the sentence that contains the answer.

The lighthouse on the cape was built in 1871 from grey stone. It is 41 metres high and its light \
can be seen from 30 kilometres away. The first keeper was a sailor called Henrik Olsen, who lived \
there with his family for 26 years. Since 1984 the light has been automatic and nobody lives in \
the lighthouse any more.

Who was the first keeper of the lighthouse?"""

CODE = """\
Write a Python function `is_palindrome(text)` that ignores case and everything that is not a \
letter, and three assertions that test it."""

MATHS = """\
A baker makes 48 rolls an hour. She works from six until ten, and a quarter of the rolls are \
eaten by the staff. She sells the others for 0.75 each. How much money does she take? Think step \
by step."""

CHAT = "I slept badly and have a long day ahead. What are three small things that could help me?"

STORY = "Write the first paragraph of a story about a lighthouse keeper who finds a letter."

PROMPTS = tuple(
    Prompt(category, category, text)
    for category, text in {
        "correction": CORRECTION,
        "rewriting": REWRITING,
        "summary": SUMMARY,
        "reading": READING,
        "code": CODE,
        "maths": MATHS,
        "chat": CHAT,
        "story": STORY,
    }.items()
)


def text_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """`count` tokens of these texts, over and over."""
    text = "\n\n".join(prompt.text for prompt in PROMPTS)
    once = tokenizer.encode(text, add_special_tokens=False)
    return (once * (count // len(once) + 1))[:count]
