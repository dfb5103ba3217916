"""Chat templates: what honest ones need works, what hostile ones try fails within a second."""

from __future__ import annotations

import os
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
    "long list": "{{ [0] * 10**9 }}",
    "joined": "{{ ['b' * 10**6] | list | join('') * 10**4 }}",
    "many joined": "{{ range(99999) | join('x' * 99999) }}",
    "centred": "{{ 'a' | center(10**9) }}",
    "indented": "{{ messages | tojson(indent=10**9) }}{{ {'a': 1} | tojson(indent=10**9) }}",
    "replaced": "{{ ('x' * 10**5) | replace('', 'y' * 10**5) }}",
    "doubled": "{% set ns = namespace(a='x') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}"
    "{% endfor %}{{ ns.a }}",
    "width": "{{ '%*d' % (10**9, 1) }}",
    "deep": "{{ " + "(" * 9999 + ")" * 9999 + " }}",
    "surrogates": "{{ '\\ud800' }}",
    "CVE-2016-10745": "{{ '{0.__class__.__base__}'.format(1) }}",
    "CVE-2019-10906": "{{ '{a.__class__.__base__}'.format_map({'a': 1}) }}",
    "CVE-2024-34359": "{% for x in ().__class__.__base__.__subclasses__() %}"
    "{% if 'warning' in x.__name__ %}{{ x()._module.__builtins__['__import__']('os').popen('id') }}"
    "{% endif %}{% endfor %}",
    "CVE-2024-56326": "{% set f = '{0.__class__.__base__}'.format %}{{ f(1) }}",
    "CVE-2025-27516": "{{ ('{0.__class__.__base__}' | attr('format'))(1) }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
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


def test_the_process_has_no_secrets_and_opens_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    template = ChatTemplate("{{ x }}")
    template.render({"x": 1})
    child = template._process._child
    assert child is not None
    process = Path("/proc") / str(child.pid)
    assert b"hf_secret" not in (process / "environ").read_bytes()
    assert re.search(r"Max open files +3 +3 ", (process / "limits").read_text())
    assert os.readlink(process / "fd" / "2") == "/dev/null"


def test_every_filter_works_without_opening_files() -> None:
    """Jinja imports some modules on first use."""
    from jinja2.filters import FILTERS

    calls = [f"{{{{ x | {name} }}}}" for name in sorted(FILTERS)]
    template = ChatTemplate(
        "{% if false %}{% elif n == 0 %}"
        + "".join(f"{{% elif n == {i + 1} %}}{call}" for i, call in enumerate(calls))
        + "{% endif %}"
    )
    for index in range(len(calls)):
        try:
            template.render({"n": index + 1, "x": "a"})
        except CheckpointError as error:
            assert "open files" not in str(error) and "stopped" not in str(error), calls[index]


def test_long_conversations_fit() -> None:
    text = "word " * 400_000
    assert ChatTemplate("{{ x }}{{ x }}").render({"x": text}) == text * 2
