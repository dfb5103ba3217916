"""Chat templates: what honest ones need works, what hostile ones try fails within a second."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from quasar.errors import CheckpointError
from quasar.text.template import CPU_SECONDS, ChatTemplate

HOSTILE = {
    "long loop": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% if a == b %}{% endif %}"
        "{% endfor %}{% endfor %}"
    ),
    "long string": "{{ 'x' * 10**10 }}",
    "large strings": "{{ ('ab' * 10**8) | replace('a', 'bb') | upper }}",
    "slow power": "{{ 9 ** (9 ** 9) }}",
    "padding": "{{ '%1000000000d' % 1 }}",
    "format padding": "{{ '{:>3000000000}'.format(1) }}",
    "flood": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "classes": "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attribute filter": "{{ (''|attr('__class__')).__mro__ }}",
    "format attribute": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "globals": "{{ raise_exception.__globals__['os'].system('touch /tmp/pwned') }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('id') }}",
    "syntax": "{% for %}",
    "unknown filter": "{{ 1|no_such_filter }}",
}


def test_rules_that_templates_rely_on() -> None:
    source = (
        "{%- for message in messages %}\n"
        "    {%- if message.role == 'skip' %}{% continue %}{% endif %}\n"
        "    {% if loop.first %}\n[{{ message['role'] | upper }}]\n    {% endif %}\n"
        "{{ message.content | trim }}\n"
        "{%- endfor %}{{ bos_token }}{{ tools is none }}"
    )
    messages = [{"role": "user", "content": " hi "}, {"role": "skip", "content": "x"}]
    text = ChatTemplate(source).render({"messages": messages, "bos_token": "<s>", "tools": None})
    assert text == "[USER]\nhi<s>True"


def test_json_date_and_generation() -> None:
    source = "{{ x|tojson(indent=1) }}{% generation %}{{ x.a }}{% endgeneration %}"
    text = ChatTemplate(source + "{{ strftime_now('%Y') }}").render({"x": {"a": "<é>"}})
    assert text == '{\n "a": "<é>"\n}<é>' + time.strftime("%Y")


def test_raise_exception_tells_the_reason() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(CheckpointError, match="roles must alternate"):
        template.render({})


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_fail(source: str) -> None:
    """The limit is processor time: wall time depends on what else the machine does."""
    with pytest.raises(CheckpointError, match="chat template") as error:
        ChatTemplate(source).render({"messages": []})
    assert not re.search("root:|subclass|<class", str(error.value))
    assert not Path("/tmp/pwned").exists()


def test_a_stopped_template_uses_no_more_than_its_second() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(CheckpointError, match=f"more than {CPU_SECONDS:g} s"):
        ChatTemplate(HOSTILE["nested loops"]).render({"messages": []})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < CPU_SECONDS + 1.5  # and starting Python and Jinja


def test_the_process_is_kept_and_replaced_after_a_stop() -> None:
    source = "{% if slow %}" + HOSTILE["nested loops"] + "{% endif %}{{ text }}"
    template = ChatTemplate(source)
    assert template.render({"slow": False, "text": "one"}) == "one"
    child = template._process._child
    assert template.render({"slow": False, "text": "two"}) == "two"
    assert template._process._child is child
    with pytest.raises(CheckpointError):
        template.render({"slow": True, "text": "three"})
    assert template.render({"slow": False, "text": "four\u2028\n"}) == "four\u2028\n"


def test_long_conversations_fit() -> None:
    text = "word " * 400_000
    assert ChatTemplate("{{ x }}{{ x }}").render({"x": text}) == text * 2
