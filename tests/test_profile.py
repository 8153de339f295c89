"""Profiles: read, found, resolved in the right order, changed without loss, refused with a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SETTINGS, RunConfig, Setting, check_value, get
from engine.errors import InputError
from engine.profile import list_profiles, load_profile, parse_set, resolve
from engine.profile_edit import edited, save_profile
from engine.profile_paths import find_profile, shipped_profiles_dir, user_profiles_dir
from tests.commandline import deny


@pytest.fixture(autouse=True)
def _own_config_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, text: str) -> str:
    """The message with which a profile of this text is refused."""
    with pytest.raises(InputError) as caught:
        resolve([write(path, text)])
    return str(caught.value)


class TestShipped:
    """The profiles that come with the package."""

    def test_there_are_some_and_each_is_good(self) -> None:
        entries = {entry.name: entry for entry in list_profiles()}
        assert {"default", "demo", "app", "small-memory", "fast-lossy", "resident"} <= set(entries)
        for entry in entries.values():
            assert entry.error == ""
            assert entry.description
            resolve([entry.path])

    def test_only_those_that_say_so_are_lossy(self) -> None:
        for entry in list_profiles():
            assert entry.lossy == entry.description.startswith("LOSSY")

    def test_default_changes_nothing(self) -> None:
        assert resolve(["default"]).replace({"description": ""}) == RunConfig()


class TestFinding:
    """A profile by its name or its path."""

    def test_the_users_profile_hides_a_shipped_one(self) -> None:
        assert find_profile("app") == shipped_profiles_dir() / "app.toml"
        mine = write(user_profiles_dir() / "app.toml", 'description = "mine"')
        assert find_profile("app") == mine
        assert load_profile("app") == {"description": "mine"}

    def test_a_broken_profile_does_not_hide_the_others(self) -> None:
        write(user_profiles_dir() / "broken.toml", "x =")
        entries = {entry.name: entry for entry in list_profiles()}
        assert "not valid TOML" in entries["broken"].error
        assert entries["app"].error == ""

    def test_a_path_is_taken_as_it_is(self, tmp_path: Path) -> None:
        path = write(tmp_path / "mine.toml", "[model]\nctx = 512")
        assert load_profile(path) == {"model.ctx": 512}

    @pytest.mark.parametrize("name", ["lap-top-16gb", "", "a\0b", "nope.toml", "no/such"])
    def test_what_is_not_there_is_named(self, name: str) -> None:
        with pytest.raises(InputError, match=r"no profile|no such profile|give a profile"):
            find_profile(name)

    def test_the_nearest_name_is_suggested(self) -> None:
        with pytest.raises(InputError, match="did you mean small-memory"):
            find_profile("small-memmory")

    def test_a_relative_model_is_beside_its_profile(self, tmp_path: Path) -> None:
        path = write(tmp_path / "sub" / "p.toml", '[model]\npath = "../m.gguf"')
        assert Path(load_profile(path)["model.path"]).resolve() == tmp_path.resolve() / "m.gguf"


class TestRefusals:
    """Each names file, line, key, what was given and what is allowed."""

    @pytest.mark.parametrize(
        ("text", "line", "said"),
        [
            ("[stream]\ncache_mb = 2000", 2, "did you mean stream.cache-mb"),
            ("[model]\n\ncache-mb = 2000", 3, "did you mean stream.cache-mb"),
            ("[streem]\nx = 1", 1, "did you mean [stream]"),
            ("\nctx = 3", 2, "did you mean model.ctx"),
            ("stream = 4", 1, "is not a table"),
            ("[[stream]]\ncache-mb = 0", 1, "is not a table"),
            ("[stream.inner]\nx = 1", 1, "there is no setting 'inner' in [stream]"),
            ("[model]\nthreads = 0", 2, "from 1 to 512, or auto"),
            ('[model]\nctx = "4k"', 2, "'4k' is a text, not a whole number"),
            ("[model]\nctx = 4096.0", 2, "not a whole number"),
            ("[stream]\no-direct = 1", 2, "not true or false"),
            ("[run]\nprompt = 1979-05-27", 2, "a date, not a text"),
            ("[stream]\n# small\ncache-mb = 800", 3, "1500"),
            ("[routing]\ndrop-cold-experts = 1.5", 2, "from 0 to 1"),
            ("[routing]\ndrop-cold-experts = nan", 2, "from 0 to 1"),
            ("[stream]\ncache-mb = ", 2, "not valid TOML"),
            ("[stream\ncache-mb = 0", 1, "not valid TOML"),
            ("a = 1\na = 2", 2, "not valid TOML"),
            ('[run]\nprompt = "x\n', 2, "a quotation mark on this line is not closed"),
            ('s = """\nx', 2, "not valid TOML"),
            ("[run]\nstop = [1]", 2, "a list of texts"),
            ("[model]\nctx = " + "9" * 5000, None, "not valid TOML"),
            ("[model]\nctx = 0x" + "f" * 5000, 2, "digits"),
        ],
    )
    def test_the_line_and_the_reason_are_told(
        self, tmp_path: Path, text: str, line: int | None, said: str
    ) -> None:
        path = tmp_path / "p.toml"
        message = refusal(path, text)
        assert message.startswith(f"{path}:{line}: " if line else f"{path}: ")
        assert said in message
        assert len(message) < 600

    def test_endless_nesting_is_refused(self, tmp_path: Path) -> None:
        assert "nested too deeply" in refusal(tmp_path / "p.toml", "a = " + "[" * 50_000)

    def test_what_is_no_text_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "p.toml"
        path.write_bytes(b"\n\xff\xfe")
        with pytest.raises(InputError, match=r"p\.toml:2: is not UTF-8"):
            load_profile(path)
        path.write_bytes(b"GGUF" + bytes(100))
        with pytest.raises(InputError, match="is a model, not a profile"):
            load_profile(path)
        path.write_bytes(b"#" * (1 << 20))
        with pytest.raises(InputError, match="larger than 256 KiB"):
            load_profile(path)
        with pytest.raises(InputError, match="is a directory"):
            load_profile(f"{tmp_path}/")

    def test_a_byte_order_mark_is_no_error(self, tmp_path: Path) -> None:
        path = tmp_path / "p.toml"
        path.write_bytes(b"\xef\xbb\xbf[model]\r\nctx = 512\r\n")
        assert load_profile(path) == {"model.ctx": 512}

    def test_an_unreadable_file_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(tmp_path / "p.toml", "")
        deny(monkeypatch, path)
        with pytest.raises(InputError, match="cannot be read: Permission denied"):
            load_profile(path)


class TestResolving:
    """Later wins, and every refusal says where the value is from."""

    def test_later_wins(self, tmp_path: Path) -> None:
        one = write(tmp_path / "1.toml", "[model]\nctx = 1\n[sampling]\ntemp = 1\nseed = 1")
        two = write(tmp_path / "2.toml", "[sampling]\ntemp = 2\nseed = 2")
        config = resolve(
            [one, two], ["seed=3", "seed=4"], {"sampling.seed": "5", "model.ctx": None}
        )
        assert (config.model.ctx, config.sampling.temp, config.sampling.seed) == (1, 2.0, 5)
        assert isinstance(config.sampling.temp, float)

    @pytest.mark.parametrize(
        ("text", "key", "value"),
        [
            ("stream.cache-mb=4000", "stream.cache-mb", 4000),
            ("cache-mb=4000", "stream.cache-mb", 4000),
            ("cache_mb = 4_000", "stream.cache-mb", 4000),
            ("cache-mb=auto", "stream.cache-mb", "auto"),
            ('cache-mb="auto"', "stream.cache-mb", "auto"),
            ("o-direct=false", "stream.o-direct", False),
            ("temp=1", "sampling.temp", 1.0),
            ("prompt=true", "run.prompt", "true"),
            ("prompt=a = b", "run.prompt", "a = b"),
            ('prompt="a\\tb"', "run.prompt", "a\tb"),
            ('stop=["a", "b"]', "run.stop", ["a", "b"]),
            ("system=", "run.system", ""),
        ],
    )
    def test_set_takes_toml_and_bare_texts(self, text: str, key: str, value: Any) -> None:
        assert parse_set(text) == (key, value)
        assert get(resolve(sets=[text]), key) == value

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("cach-mb=1", "did you mean stream.cache-mb"),
            ("streem.cache-mb=1", "did you mean stream.cache-mb"),
            ("zzzz=1", "no setting 'zzzz'"),
            ("cache-mb", "key=value"),
            ("=3", "key=value"),
            ("cache-mb=800", "--set stream.cache-mb: 800 MiB is refused"),
            ("cache-mb=4GB", "'4GB' is not allowed"),
            ("cache-mb=1\nx=2", "is not allowed"),
            ("threads=0", "from 1 to 512, or auto"),
            ("ctx=-1", "-1 is out of range"),
            ("o-direct=yes", "'yes' is a text, not true or false"),
        ],
    )
    def test_a_bad_set_is_explained(self, text: str, said: str) -> None:
        with pytest.raises(InputError) as caught:
            resolve(sets=[text])
        assert said in str(caught.value)

    def test_a_flag_is_named_by_its_flag(self) -> None:
        with pytest.raises(InputError, match=r"^--threads: 10000 is out of range"):
            resolve(flags={"model.threads": "10000"})

    def test_a_prompt_is_taken_as_typed(self) -> None:
        assert resolve(flags={"run.prompt": ' "hi" '}).run.prompt == ' "hi" '

    def test_a_pair_of_settings_names_both_places(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.toml", "[routing]\ndrop-cold-experts = 0.5")
        with pytest.raises(InputError) as caught:
            resolve([path], flags={"stream.cache-mb": "0"})
        assert str(caught.value).startswith(f"{path}:2: routing.drop-cold-experts: ")
        assert "stream.cache-mb = 0 is from --cache-mb" in str(caught.value)


def _values_of(spec: Setting) -> st.SearchStrategy[Any]:
    candidates = st.one_of(
        st.booleans(),
        st.integers(int(spec.low or 0), int(spec.high or 0)),
        st.floats(spec.low or 0.0, spec.high or 0.0),
        st.sampled_from(["auto", "off", "anon", "warm", "mmap", "drop", "substitute"]),
        st.text(st.characters(codec="utf-8", exclude_characters="\0")),
        st.lists(st.text(st.characters(codec="utf-8")), max_size=3),
    )
    return candidates.filter(lambda value: check_value(spec, value) is None)


_CHANGES = st.lists(
    st.sampled_from(sorted(SETTINGS)).flatmap(
        lambda key: st.tuples(st.just(key), st.none() | _values_of(SETTINGS[key]))
    ),
    max_size=6,
).map(dict)

_LAYOUTS = st.sampled_from(
    [
        "",
        "# mine\n",
        "[stream] # fast\ncache-mb = 4000 # enough\n\n[model]\nctx = 512\n",
        'description = "x"\r\n[model]\r\nctx = 512\r\n',
        "stream.cache-mb = 4000\nstream.io-threads = 2\n",
        "stream = { cache-mb = 4000 }\n",
        "[sampling]\ntemp = 0.5 # cool\n# end",
    ]
)


class TestSaving:
    """Changes are made in place; comments and layout stay."""

    @given(_LAYOUTS, _CHANGES)
    def test_what_was_saved_is_read_back(self, text: str, changes: dict[str, Any]) -> None:
        from engine.profile import _flatten, parse

        def values(document: str) -> dict[str, Any]:
            return {".".join(key): value for key, value in _flatten(parse(document, Path("p")))}

        expected = values(text)
        for key, value in changes.items():
            expected.pop(key, None)
            if value is not None:
                expected[key] = value
        after = edited(text, changes, Path("p.toml"))
        assert values(after) == expected
        for comment in ("# mine", "# fast", "# end"):
            assert (comment in after) == (comment in text)

    @given(_CHANGES)
    def test_a_configuration_survives_the_round_trip(
        self, tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
    ) -> None:
        changes = {key: value for key, value in changes.items() if value is not None}
        changes.pop("model.path", None)
        changes["stream.force-cache"] = True
        changes["routing.drop-cold-experts"] = 0.0
        path = tmp_path_factory.mktemp("profiles") / "p.toml"
        save_profile(path, changes)
        assert resolve([path]) == RunConfig().replace(changes)

    def test_comments_order_and_mode_stay(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "p.toml", "# head\n[stream]\ncache-mb = 4000 # why\no-direct = true\n"
        )
        path.chmod(0o600)
        save_profile(path, {"stream.cache-mb": "auto", "run.n-predict": 8})
        assert path.read_text() == (
            '# head\n[stream]\ncache-mb = "auto" # why\no-direct = true\n\n[run]\nn-predict = 8\n'
        )
        assert path.stat().st_mode & 0o777 == 0o600
        assert list(tmp_path.glob(".p.toml*")) == []

    def test_a_link_stays_a_link(self, tmp_path: Path) -> None:
        path = write(tmp_path / "real.toml", "")
        link = tmp_path / "link.toml"
        link.symlink_to(path)
        save_profile(link, {"model.ctx": 512})
        assert link.is_symlink()
        assert load_profile(path) == {"model.ctx": 512}

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"stream.cach-mb": 0}, "did you mean stream.cache-mb"),
            ({"model.threads": 0}, "from 1 to 512"),
            ({"model.ctx": 5, "run.stop": "x"}, "a list of texts"),
        ],
    )
    def test_a_bad_change_changes_nothing(
        self, tmp_path: Path, changes: dict[str, Any], said: str
    ) -> None:
        path = write(tmp_path / "p.toml", "[model]\nctx = 1\n")
        with pytest.raises(InputError) as caught:
            save_profile(path, changes)
        assert said in str(caught.value)
        assert path.read_text() == "[model]\nctx = 1\n"

    def test_a_broken_profile_is_not_overwritten(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.toml", "[model\n")
        with pytest.raises(InputError, match="not valid TOML"):
            save_profile(path, {"model.ctx": 5})
        assert path.read_text() == "[model\n"
