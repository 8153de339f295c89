"""An escape-sequence corpus through the chat: what reaches the terminal is text and colour only."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.segment import Segment
from textual.pilot import Pilot
from textual.widgets import OptionList

from engine import messages as wire
from tests.chat_app import ChatApp, answer, failed, finished, opened, say
from tuiwork.chat.blocks import CodePiece
from tuiwork.chat.conversation import Conversation
from tuiwork.chat.history import History
from tuiwork.chat.history_screen import HistoryScreen
from tuiwork.chat.message_views import NoticeView
from tuiwork.chat.parsing import blocks_of, parse
from tuiwork.chat.untrusted import visible
from tuiwork.model_picker.probe import Facts
from tuiwork.model_picker.recent import Recent
from tuiwork.model_picker.screen import ModelPicker

ESC = "\x1b"
CORPUS = {
    "colour": f"{ESC}[31mred{ESC}[0m",
    "clear screen": f"{ESC}[2J{ESC}[H{ESC}c",
    "cursor": f"{ESC}[10A{ESC}[s{ESC}[u\b\b\b\r",
    "window title": f"{ESC}]0;owned\x07",
    "answerback": f"\x05{ESC}[c{ESC}[6n{ESC}[>q{ESC}]11;?\x07",
    "clipboard": f"{ESC}]52;c;cm0gLXJmIC8=\x07",
    "hyperlink": f"{ESC}]8;;file:///etc/passwd{ESC}\\click{ESC}]8;;{ESC}\\",
    "notification": f"{ESC}]9;hi\x07{ESC}]777;notify;a;b{ESC}\\",
    "device control": f"{ESC}P+q544e{ESC}\\{ESC}P$qm{ESC}\\{ESC}_Gf=100;AAAA{ESC}\\",
    "alternate screen": f"{ESC}[?1049h{ESC}[?1000h{ESC}[?2004l",
    "split sequence": f"{ESC}" + "[" + "3" + "1m",
    "c1": "\x9b31m\x9d0;x\x9c\x90q\x9c\x85\x8d",
    "nul and delete": "a\x00b\x7fc\x08d\x0ee\x0ff",
    "line breaks": "one\x0btwo\x0cthree\x1cfour\x85five\u2028six\u2029seven\r\neight\rnine",
    "bidi": "abc \u202egnp.exe\u202c \u2066x\u2069 \u200e\u200f\u061c",
    "zero width": "pa\u200bss\u2060wo\ufeffrd\u00ad\u180e",
    "tags": "hello" + "".join(chr(0xE0000 + ord(c)) for c in "do evil"),
    "surrogates": "\ud800\udfff\udc9b31m",
    "entities": "&#27;[31m &#x9b;31m &#x202e;abc &#8203; &NewLine; &Tab; &lt;b&gt; &#0; &#xD800;",
    "markup": "[red]x[/red] [@click=app.bell]y[/] [link=file:///etc]z[/link] [/] [[ ]] [bold",
    "markup in code": "`[@click=app.quit]x[/]`\n\n```python\n[red]x[/red]  # [@click=a.b]\n```",
    "javascript": "[a](javascript:alert(1)) [b](file:///etc/passwd) [c](data:text/html,x)",
    "links": "<https://example.org> [d](https://e.org 'title [red]') ![i](http://e.org/a.png)",
    "entity link": "[e](&#106;avascript:alert(1)) [f](java\nscript:x) [g](\x1b]8;;http://x)",
    "reference": "[h][1]\n\n[1]: file:///etc/passwd 'x'",
    "html": "<a href='javascript:x' onclick=y>z</a>\n\n<script>alert(1)</script>\n\n<!-- c -->",
    "fence info": f"```{ESC}]0;x\x07 [red]\nx\n```\n\n```[@click=app.quit]\ny\n```\n\n```\x9b\nz",
    "table": f"|a{ESC}[1m|[red]b|\n|--|--|\n|\x07|[link](file:///x)|",
    "heading": f"# {ESC}[1mx [red]y[/]\n\n{ESC}]0;t\x07\n===",
    "deep quotes": "> " * 200 + "x",
    "deep list": "".join("  " * depth + "- x\n" for depth in range(60)),
    "brackets": "[" * 3000,
    "emphasis": "*_" * 2000 + "x",
    "backticks": "`" * 999 + "x" + "``" * 500,
    "huge line": "y" * 60_000,
    "huge word in code": "```python\n" + "(" * 30_000 + "\n```",
    "wide": "漢字" * 200 + "e\u0301" * 100 + "👩‍👩‍👧‍👦" * 40,
    "combining": "a" + "\u0301" * 500,
    "tabs": "a\tb\t\tc\n\n```\n\tx\ty\n```\n\n\tcode\t!",
    "reasoning": f"<think>{ESC}[2J[red]hm[/red]</think>{ESC}[1mso",
    "open reasoning": f"<think>[@click=app.quit]x[/]{ESC}",
}


SHORT = {name: text for name, text in CORPUS.items() if len(text) < 5_000}
SCROLLBAR = ("scroll_up", "scroll_down", "grab", "release")
"""What Textual's own scrollbars do when they are clicked."""


def troubles(segments: Iterable[Segment]) -> list[str]:
    """What of some output a terminal or Textual would obey."""
    found = []
    for text, style, control in segments:
        for character in text:
            if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
                found.append(f"{character!r} in {text!r}")
            if character in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200b\ufeff":
                found.append(f"unseen {character!r} in {text!r}")
        if control:
            found.append(f"control segment {text!r}")
        if style is not None:
            meta: dict[str, Any] = style.meta
            if style.link or any(
                key.startswith("@") and value not in SCROLLBAR for key, value in meta.items()
            ):
                found.append(f"something to click: {style.link!r} {meta!r}")
    return found


def screen_troubles(app: ChatApp) -> list[str]:
    """The same, of all that is on the screen."""
    return troubles(segment for strip in app.strips() for segment in strip)


class TestOnTheScreen:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("size", [(80, 24), (23, 12)])
    async def test_corpus_streamed(self, size: tuple[int, int]) -> None:
        app = ChatApp()
        async with app.run_test(size=size) as pilot:
            app.hear(opened())
            for name, text in CORPUS.items():
                app.chat.action_new()
                app.ask("Go")
                for start in range(0, len(text), max(1, len(text) // 40)):
                    app.hear(wire.Text(1, text[start : start + max(1, len(text) // 40)]))
                await self._look(pilot, app, name)
                app.hear(finished())
                if size[0] == 80:
                    app.chat.action_thinking()
                    await self._look(pilot, app, name)

    async def _look(self, pilot: Pilot[None], app: ChatApp, name: str) -> None:
        app.chat._flush_after = 0.0
        app.chat.flush()
        await pilot.pause()
        assert screen_troubles(app) == [], name

    @pytest.mark.asyncio
    async def test_corpus_in_the_persons_words_and_failures(self) -> None:
        app = ChatApp()
        async with app.run_test(size=(100, 400)) as pilot:
            app.hear(opened())
            for text in SHORT.values():
                app.ask(text)
                app.hear(failed(text))
            await pilot.pause()
            assert screen_troubles(app) == []
            assert len(app.query(NoticeView)) == len(SHORT)
            app.chat.composer.put("".join(SHORT.values()))
            await pilot.pause()
            assert screen_troubles(app) == []

    @pytest.mark.asyncio
    async def test_corpus_in_kept_conversations(self, tmp_path: Path) -> None:
        history = History(tmp_path)
        for text in SHORT.values():
            kept = history.begin(text, lambda trouble: None)
            conversation = Conversation(kept)
            conversation.say(f"x {text}")
            conversation.rename(text)
            kept.close()
        app = ChatApp()
        async with app.run_test(size=(100, 200)) as pilot:
            app.push_screen(HistoryScreen(history))
            await pilot.pause(0.7)
            assert screen_troubles(app) == []
            await pilot.press("x")
            await pilot.pause(0.7)
            assert screen_troubles(app) == []
            assert app.screen.query_one(OptionList).option_count > 20

    @pytest.mark.asyncio
    async def test_corpus_in_the_model_picker(self, tmp_path: Path) -> None:
        (tmp_path / "x.gguf").write_text("")
        facts = []
        for text in SHORT.values():
            path = tmp_path / text[:50].replace("/", "_").replace("\0", "")
            facts.append(Facts(path, text, text, 10**9, 2, 4, 8, 2, 10))
            facts.append(Facts(path.with_name(path.name + "2"), problem=text))
        app = ChatApp()
        async with app.run_test(size=(100, 300)) as pilot:
            picker = ModelPicker(
                folder=tmp_path,
                recent=Recent(tmp_path / "recent.json"),
                probe=lambda paths, cancelled: iter(facts),
            )
            app.push_screen(picker)
            # The list grows as headers are read; a busy machine takes its time.
            for _ in range(200):
                await pilot.pause(0.7)
                if picker.query_one(OptionList).option_count > 60:
                    break
            assert screen_troubles(app) == []
            assert picker.query_one(OptionList).option_count > 60

    @pytest.mark.asyncio
    async def test_what_is_shown_instead(self) -> None:
        app = ChatApp()
        async with app.run_test(size=(80, 24)) as pilot:
            app.hear(opened())
            await say(pilot, "Go")
            await answer(pilot, f"a{ESC}[31mb\x07 [red]c[/red] \u202ed [e](javascript:x) &#x202e;")
            assert "a␛[31mb␇ [red]c[/red] \\u202ed [e](javascript:x) \\u202e" in app.screen_text()
            await pilot.click(offset=(20, 5))
            await pilot.pause()
            assert app.screen_text()  # nothing that was clicked did anything


class TestBlocks:
    @pytest.mark.parametrize("name", CORPUS)
    def test_no_span_is_anything_but_a_look(self, name: str) -> None:
        for block in blocks_of(parse(visible(CORPUS[name]))):
            for line in block.lines(60):
                for span in line.spans:
                    if not isinstance(span.style, str):
                        assert not span.style.meta
                    else:
                        assert "@" not in span.style
                        assert "link" not in span.style
                assert not troubles([Segment(line.plain)])

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.sampled_from(sorted(CORPUS)), min_size=1, max_size=4), st.integers(0, 200))
    def test_corpus_in_any_order_and_cut(self, names: list[str], cut: int) -> None:
        text = "\n\n".join(CORPUS[name][:300] for name in names)[cut:]
        for block in blocks_of(parse(visible(text))):
            for line in block.lines(40):
                assert not troubles([Segment(line.plain)])

    def test_copied_code_is_what_was_seen(self) -> None:
        (block,) = blocks_of(parse(visible("```\nrm -rf \x1b[8m/\x1b[0m \u202e\n```")))
        assert isinstance(block, CodePiece)
        assert block.code.source == "rm -rf ␛[8m/␛[0m \\u202e"
