"""The pure parts of the chat: untrusted text, reasoning, Markdown in pieces, layout, the gauge."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tuiwork.chat import reasoning
from tuiwork.chat.blocks import Block, CodePiece, Prose, Table, fit_columns
from tuiwork.chat.gauge import gauge
from tuiwork.chat.parsing import PIECE_LINES, blocks_of, parse
from tuiwork.chat.streaming import FORCED_CUT, StreamedMarkdown
from tuiwork.chat.untrusted import LineEnds, visible, without_unseen
from tuiwork.chat.when import ago

tags = ["<think>", "</think>", "<thinking>", "</thinking>", "<seed:think>", "</seed:think>"]
other = [
    "<thi",
    "</think",
    "\n",
    " ",
    "\t",
    "word",
    "<",
    ">",
    "/",
    "a b",
    "\n\n",
    "\u00a0",
    "\u2003",
]
marks = st.sampled_from([*tags, *other])
answers = st.lists(marks, max_size=12).map("".join)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    """`text` cut at some places."""
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class TestReasoning:
    @given(answers, st.lists(st.integers(0, 60), max_size=8))
    @example("<think>\n\n</think>\n\nYes", [3])
    @example(" <think>a </think", [9])
    def test_any_chunking_agrees_with_the_engine(self, text: str, cuts: list[int]) -> None:
        from engine.chat import split_reasoning

        splitter = reasoning.ReasoningSplitter()
        parts = [splitter.feed(piece) for piece in pieces_of(text, cuts)] + [splitter.finish()]
        joined = tuple("".join(column) for column in zip(*parts, strict=True))
        assert joined == split_reasoning(text)
        assert reasoning.split(text) == joined

    def test_words_are_not_held_back(self) -> None:
        splitter = reasoning.ReasoningSplitter()
        assert splitter.feed("<think>so far") == ("so far", "")
        assert splitter.in_reasoning
        assert splitter.feed("</think>Yes") == ("", "Yes")
        assert not splitter.in_reasoning


class TestVisible:
    @given(st.text(st.characters(codec=None)))
    def test_nothing_stays_that_a_terminal_obeys_or_a_reader_cannot_see(self, text: str) -> None:
        shown = visible(text)
        for character in shown:
            kind = unicodedata.category(character)
            joins = character in "\u200c\u200d\n\t"
            assert joins or kind not in ("Cc", "Cs", "Zl", "Zp"), hex(ord(character))
        shown.encode("utf-8")

    @given(st.text(st.characters(codec=None)), st.integers(0, 20))
    def test_pieces_give_what_the_whole_gives(self, text: str, cut: int) -> None:
        assert visible(text[:cut]) + visible(text[cut:]) == visible(text)

    def test_what_a_person_pastes_loses_only_what_nobody_sees(self) -> None:
        assert without_unseen("\ufeffa\u200bb\x1b[0mc") == "ab␛[0mc"

    @given(st.text(st.sampled_from("a\r\n")), st.lists(st.integers(0, 30), max_size=6))
    def test_line_ends_of_windows(self, text: str, cuts: list[int]) -> None:
        ends = LineEnds()
        parts = [ends.feed(piece) for piece in pieces_of(text, cuts)] + [ends.finish()]
        assert "".join(parts) == text.replace("\r\n", "\n")


lines = st.sampled_from(
    [
        "Some words of *text* with `code` and **more**.",
        "# Heading",
        "Setext",
        "---",
        "===",
        "- item",
        "  - nested",
        "  more of the item",
        "* other",
        "1. first",
        "2. second",
        "1.5 kg",
        "> quoted",
        "> - in a quote",
        "```python",
        "```",
        "~~~",
        "````",
        "    indented",
        "| a | b |",
        "|---|--:|",
        "| 1 | 2 |",
        "",
        "",
        "-",
        "<b>html</b>",
        "[link](http://a.b)",
    ]
)
documents = st.lists(lines, max_size=16).map("\n".join)


def shown(blocks: list[Block], width: int = 50) -> list[str]:
    """The blocks as lines of text."""
    return [line.plain for block in blocks for line in [*block.gap, *block.lines(width)]]


class TestStreaming:
    @given(documents, st.lists(st.integers(0, 400), max_size=12))
    @example("- a\n1.5 kg", [7])
    @example("```\ncode\n```\n\nafter", [5, 9])
    @example("> ```\n> code\nafter\n", [4, 8])
    @example("```\ncode\n\n```", [])
    def test_any_chunking_shows_what_a_whole_parse_shows(self, text: str, cuts: list[int]) -> None:
        stream = StreamedMarkdown()
        for piece in pieces_of(text, cuts):
            stream.feed(piece)
        stream.finish()
        assert shown(stream.closed) == shown(blocks_of(parse(text)))

    @given(documents)
    def test_closed_blocks_never_change(self, text: str) -> None:
        stream = StreamedMarkdown()
        before: list[Block] = []
        for character in text:
            stream.feed(character)
            if stream.recoloured:
                before = before[: stream.recoloured[0][0]]
                stream.recoloured.clear()
            assert [id(block) for block in stream.closed[: len(before)]] == list(map(id, before))
            before = list(stream.closed)

    @pytest.mark.parametrize("opening", ["", "```\n"])
    @pytest.mark.parametrize(
        "piece", ["word ", "- item\n", "x = 1\n", "a", "> q\n", "|a|b\n", "* * *"]
    )
    def test_what_is_looked_at_in_each_flush_is_bounded(self, piece: str, opening: str) -> None:
        piece *= 3_000 // len(piece)
        stream = StreamedMarkdown()
        stream.feed(opening)
        for _ in range(15):
            stream.feed(piece)
            assert opening or len(stream._source) <= FORCED_CUT
            in_tail = sum(len(line) for line in shown(stream.tail, 80))
            assert in_tail < 3 * FORCED_CUT

    def test_a_long_code_block_is_drawn_in_pieces_and_copied_whole(self) -> None:
        source = "\n".join(f"x = {number}" for number in range(3 * PIECE_LINES + 5))
        stream = StreamedMarkdown()
        for line in f"```python\n{source}\n```\nafter\n".splitlines(keepends=True):
            stream.feed(line)
        stream.finish()
        pieces = [block for block in stream.closed if isinstance(block, CodePiece)]
        assert len(pieces) == 4
        assert {id(piece.code) for piece in pieces} == {id(pieces[0].code)}
        assert pieces[0].code.source == source
        assert [piece.head for piece in pieces] == [True, False, False, False]

    def test_colours_are_right_in_the_end(self) -> None:
        """Textual issue 6518: what was streamed must not stay as it looked half-way."""
        source = '"""\n' + "text\n" * (2 * PIECE_LINES) + '"""'
        stream = StreamedMarkdown()
        for line in f"```python\n{source}\n```\n".splitlines(keepends=True):
            stream.feed(line)
        stream.finish()
        pieces = [block for block in stream.closed if isinstance(block, CodePiece)]
        whole = blocks_of(parse(f"```python\n{source}\n```\n"))
        assert [piece.content.spans for piece in pieces] == [
            block.content.spans for block in whole if isinstance(block, CodePiece)
        ]


class TestLayout:
    @given(documents, st.integers(1, 60))
    def test_no_line_is_wider_than_its_place(self, text: str, width: int) -> None:
        for block in blocks_of(parse(text)):
            for line in block.lines(width):
                # One wide character is the least that a line can hold.
                assert line.cell_length <= max(width, 2)

    @given(st.lists(st.integers(0, 80), min_size=1, max_size=8), st.integers(1, 120))
    def test_columns_fit_or_are_as_narrow_as_they_get(self, natural: list[int], room: int) -> None:
        widths = fit_columns(natural, room)
        assert sum(widths) <= room or max(widths) == 3
        assert all(width <= max(3, wanted) for width, wanted in zip(widths, natural, strict=True))

    def test_links_show_where_they_lead(self) -> None:
        (block,) = blocks_of(parse("[the bank](https://evil.example/x) ![cat](http://a/b.png)"))
        assert isinstance(block, Prose)
        assert block.content.plain == (
            "the bank ‹https://evil.example/x› [image: cat] ‹http://a/b.png›"
        )

    def test_a_table_keeps_its_columns(self) -> None:
        (table,) = blocks_of(parse("|a|b|\n|:--|--:|\n|one|2|\n|three|44|"))
        assert isinstance(table, Table)
        assert [line.plain for line in table.lines(40)] == [
            "a     │   b",
            "──────┼────",
            "one   │   2",
            "three │  44",
        ]

    def test_verses_stay_and_wrapped_prose_flows(self) -> None:
        (verse,) = blocks_of(parse("Roses are red\nViolets are blue"))
        (prose,) = blocks_of(parse("a word " * 10 + "\nflows on"))
        assert len(verse.lines(100)) == 2
        assert len(prose.lines(100)) == 1

    def test_numbers_and_nesting(self) -> None:
        text = "3. three\n4. four\n   - inside\n\n     more\n"
        assert shown(blocks_of(parse(text))) == [
            " 3. three",
            " 4. four",
            "",
            "     • inside",
            "",
            "       more",
        ]


class TestSmallWords:
    def test_gauge(self) -> None:
        assert gauge(1204, 4096).plain == "1\u202f204 of 4\u202f096 tokens ━━━───── 29 %"
        assert gauge(4000, 4096, draft=5000).plain.endswith("━━━━━━━━ 100 %")
        assert gauge(0, 4096).plain.endswith("──────── 0 %")
        assert gauge(None, 4096).plain == ""

    def test_ago(self) -> None:
        assert [ago(0, now) for now in (1, 59, 61, 7300, 90_000)] == [
            "just now",
            "59 s ago",
            "1 min ago",
            "2 h ago",
            "1 d ago",
        ]
        assert ago(0, 1e9).startswith("19")
