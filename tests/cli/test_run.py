"""`fedheal run`: what it prints, leaves behind and refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fedheal
from command_line import CONTROL, ENVIRONMENT, Done, assert_sentence, read_files
from fedheal import engine
from fedheal.runs.schema import RoundRecord
from tiny_data import WORDS, quick, words

WRONG = [
    (["rounds=-1"], ["rounds", "-1"]),
    (["rounds=1.5"], ["rounds", "1.5"]),
    (["rounds=many"], ["rounds", "many"]),
    (["rounds=true"], ["rounds = True: use a whole number"]),
    (["lr=true"], ["lr = True: use a number"]),
    (["server_optimizer=true"], ["server_optimizer = True: use 'sgd', 'adam'"]),
    (["rounds=1", "warmup_rounds=5"], ["warmup_rounds = 5: use fewer than rounds = 1"]),
    (["only=plain,"], ["only = 'plain,' has an empty name: leave out the comma"]),
    (["without="], ["without = '' has an empty name: name a domain or client, or leave it out"]),
    (["fphl=maybe"], ["fphl = maybe: use true or false"]),
    (["fraction=0.001"], ["fraction = 0.001 of the 60 training examples of domain 'plain'", ": use a larger fraction"]),
    (
        ["method=standalone"],
        ["'standalone' is a bound, which takes no parts or parameters: name it alone, as in `fedheal compare"],
    ),
    (
        ["method=fedce+fedadam", "validation=0.2"],
        ["method 'fedce+fedadam': fedce takes a client's", "; leave out fedadam"],
    ),
    (["lr=inf"], ["lr", "inf"]),
    (["lr=nan"], ["lr", "nan"]),
    (["server_lr=inf"], ["server_lr", "inf"]),
    (["participation=0"], ["participation"]),
    (["evaluate=seen"], ["evaluate", "seen", "unseen"]),
    (["lr_schedule=step"], ["lr_schedule", "lr_decay_every"]),
    (["method=scaffold", "optimizer=adam"], ["optimizer", "adam", "scaffold", "sgd"]),
    (["method=fedadam", "server_lr=1"], ["server_lr", "fedadam", "eta"]),
    (["bogus=3"], ["bogus"]),
    (["taw=.3"], ["taw", "tau"]),
    (["taw=0.3"], ["taw", "tau"]),
    (["tau=2"], ["tau", "2"]),
    (["tau=x"], ["tau", "x"]),
    (["sed=1"], ["sed", "seed"]),
    (["=3"], ["=3", "key=value"]),
    (["a-b=3"], ["a-b=3", "key=value"]),
    (["method=fedhael"], ["fedhael", "fedheal"]),
    (["method=fedavg+fedavg"], ["fedavg+fedavg"]),
    (["method=fedheal+uniform"], ["fedheal+uniform", "weights"]),
    (["method="], ["method"]),
    (["method=3"], ["method", "3"]),
    (["method=fedavg", "tau=0.3"], ["tau", "fedavg"]),
    (["method=fedheal:tau=0.2", "tau=0.3"], ["tau", "0.2", "0.3"]),
    (["data=nowhere"], ["nowhere", "embedded"]),
    (["data=./"], ["there is no data set './' (did you mean data=folder:./?)"]),
    (["data=no_such_module:load"], ["no_such_module"]),
    (["data=tiny_data:nothing"], ["tiny_data:nothing"]),
    (["data=tiny_data:QUICK"], ["tiny_data:QUICK"]),
    (["data=tiny_data:linear"], ["tiny_data:linear"]),
    (["data=tiny_data:failing"], ["the data set's function 'tiny_data:failing' raised KeyError: 'nothing'"]),
    (["data=tiny_data:uneven"], ["tiny_data:linear", "does not fit images of shape (3, 16, 16)"]),
    (["data=tiny_data:uneven", "pool=true"], ["several sizes (plain 8 x 8, noisy 8 x 8, dark 16 x 16)", "one size"]),
    (["data=os:getcwd"], ["os:getcwd", "Domains"]),
    (["data=.x:load"], [".x:load"]),
    (["model=resnet11"], ["resnet11", "resnet10"]),
    (["model=no_such_module:net"], ["no_such_module"]),
    (["model=.x:net"], [".x:net"]),
    (["model=os:getcwd"], ["os:getcwd"]),
    (["width=3"], ["width", "tiny_data:linear"]),
    (["model=tiny_data:unable"], ["the model's factory 'tiny_data:unable' raised RuntimeError: no weights here"]),
    (["model=tiny_data:leaving"], ["the model's factory 'tiny_data:leaving' raised SystemExit: 3"]),
    (["data=tiny_data:leaving_without_data"], ["the data set's function", "raised SystemExit"]),
    (["model=tiny_data.py:linear"], ["'tiny_data.py:linear' cannot be imported", "; leave out .py: tiny_data:linear"]),
    (["model=tiny_data.linear"], ["there is no model 'tiny_data.linear' (did you mean 'tiny_data:linear'?)"]),
    (["model=nn.Linear"], ["there is no model 'nn.Linear'; choose one of small_cnn"]),
    (["model=tiny_data.py"], ["there is no model 'tiny_data.py' (did you mean 'tiny_data:factory'?)"]),
    (["model=tiny_data:SIDE"], ["'tiny_data:SIDE' cannot be imported: 'SIDE' is an int, not a function"]),
    (["model=tiny_data:Unpooled", "method=fedproto"], ["tiny_data:Unpooled", "in training"]),
    (["samples_per_client=1000"], ["1000"]),
    (["device=tpu"], ["fedheal: device = 'tpu' cannot be used here: use auto"]),
    (["device=meta"], ["fedheal: device = 'meta' cannot be used here: use auto"]),
    (["device=cuda:x"], ["device = 'cuda:x' cannot be used here (Invalid device string: 'cuda:x'): use auto"]),
    (["tau=0.3", "tau=0.4"], ["'tau' is given twice", "tau=0.3", "tau=0.4"]),
    (["missing.toml"], ["missing.toml", "No such file"]),
    (["fedheal"], ["'fedheal' is neither a field (key=value, such as method=fedheal) nor a file (FILE.toml)"]),
    (["rounds"], ["'rounds' is neither a field (key=value, such as rounds=10) nor a file (FILE.toml)"]),
    (["tau", "=", "0.3"], ["has spaces around '=': write key=value without them"]),
    (["one.toml", "two.toml"], ["one.toml", "two.toml"]),
    (["."], ["fedheal: . is a folder: name an experiment file, such as experiment.toml"]),
]


def test_a_run_leaves_a_folder_and_prints_plain_lines(call, tmp_path: Path) -> None:
    done = call("run", *WORDS, "name=first", "method=fedavg+uniform")
    assert (done.code, done.err) == (0, "")
    for word in ("fedavg+uniform", "plain", "noisy", "dark", "AVG", "STD", "worst", "round 1/3", "round 3/3"):
        assert word in done.out
    assert CONTROL.search(done.out) is None
    assert done.out.endswith("\nruns/first\n")
    folder = tmp_path / "runs" / "first"
    assert {p.name for p in folder.iterdir()} >= {"experiment.toml", "rounds.jsonl", "result.json", "model.safetensors"}
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 3


def test_without_a_name_the_folder_says_method_data_seed_and_what_is_not_the_default(call, tmp_path: Path) -> None:
    few = ["data=tiny_data:load", "model=tiny_data:linear", "rounds=1", "epochs=1"]
    for more in (["tau=0.4", "seed=5"], [], ["lr=0.02"]):
        assert call("run", *few, *more, "--quiet").code == 0
    end = "_model=tiny_data_linear_rounds=1_epochs=1"
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {
        f"fedavg+fedheal_tau=0.4-tiny_data_load-seed5{end}",
        f"fedavg+fedheal-tiny_data_load-seed0{end}",
        f"fedavg+fedheal-tiny_data_load-seed0{end}_lr=0.02",
    }


def test_a_model_function_of_python_works_on_the_command_line(call, tmp_path: Path) -> None:
    code = "from torch import nn\n\ndef make(num_classes, input_shape):\n"
    code += "    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0] * input_shape[1] ** 2, num_classes))\n"
    (tmp_path / "my_model_function.py").write_text(code)
    done = call("run", *words("model=my_model_function:make", "rounds=1"), "--quiet", "--out", "here")
    assert (done.code, done.err) == (0, "")
    sys.modules.pop("my_model_function")


def test_json_is_alone_on_stdout_and_the_same_as_the_file(call, tmp_path: Path) -> None:
    done = call("run", *WORDS, "--json", "--out", "here")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == json.loads((tmp_path / "here" / "result.json").read_text())


def test_quiet_prints_nothing(call, tmp_path: Path) -> None:
    assert call("run", *WORDS, "--quiet", "--out", "here") == Done(0, "", "")
    assert (tmp_path / "here" / "result.json").exists()


def test_unseen_domains_have_a_run_each_and_a_table(call, tmp_path: Path) -> None:
    asked = ["run", *words("rounds=1"), "method=fedavg", "evaluate=unseen", "--out", "here"]
    done = call(*asked)
    assert (done.code, done.err) == (0, "")
    assert "3 runs into here" in done.out
    assert "tiny_data:load, unseen domains: accuracy of a model that was trained without the domain" in done.out
    names = [f"fedavg-tiny_data_load-seed0-unseen-{domain}" for domain in ("dark", "noisy", "plain")]
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == names
    (row,) = json.loads(call(*asked, "--json").out)["rows"]  # of the finished runs
    assert row["evaluate"] == "unseen"
    part = json.loads((tmp_path / "here" / names[0] / "result.json").read_text())
    assert (row["accuracy.dark"], row["ece.dark"]) == (part["domains"]["dark"], part["calibration"]["dark"]["ece"])


def test_a_file_and_words_which_win(call, tmp_path: Path) -> None:
    lines = [f'{key} = "{value}"' if not value[0].isdigit() else f"{key} = {value}" for key, value in
             (word.split("=") for word in WORDS)]  # fmt: skip
    (tmp_path / "one.toml").write_text("\n".join([*lines, "tau = 0.4", "seed = 3"]))
    done = call("run", "one.toml", "rounds=2", "--json", "--out", "here")
    result = json.loads(done.out)
    assert (result["rounds"], result["seed"], result["method"]) == (2, 3, "fedavg+fedheal:tau=0.4")


def test_the_experiment_file_of_a_run_runs_again_to_the_same_bits(call, tmp_path: Path) -> None:
    call("run", *WORDS, "tau=0.4", "--quiet", "--out", "one")
    call("run", "one/experiment.toml", "--quiet", "--out", "two")
    one, two = read_files(tmp_path / "one"), read_files(tmp_path / "two")
    assert one["model.safetensors"] == two["model.safetensors"]
    assert one["experiment.toml"] == two["experiment.toml"]


@pytest.mark.parametrize("extreme", ["tau=1", "tau=0", "beta=1", "beta=0", "lr=1", "server_lr=2"])
def test_a_whole_number_for_a_fraction_can_be_resumed(call, extreme: str) -> None:
    assert call("run", *WORDS, "rounds=1", extreme, "--quiet", "--out", "here").code == 0
    done = call("run", *WORDS, "rounds=1", extreme, "--quiet", "--out", "here", "--resume")
    assert (done.code, done.err) == (0, "")


def test_resuming_a_finished_run_returns_at_once_with_the_same_result(call, tmp_path: Path) -> None:
    first = call("run", *WORDS, "--json", "--out", "here")
    before = read_files(tmp_path / "here")
    started = time.monotonic()
    again = call("run", *WORDS, "--json", "--out", "here", "--resume")
    assert time.monotonic() - started < 5
    assert again.out == first.out
    assert read_files(tmp_path / "here") == before


def test_resume_of_a_run_that_never_began_starts_it(call) -> None:
    assert call("run", *WORDS, "--resume", "--quiet", "--out", "here") == Done(0, "", "")


def test_weights_that_the_controls_do_not_have_are_noted_before_the_first_round(call) -> None:
    given = [word for word in WORDS if not word.startswith("method=")]
    problem = "the weights of 'afl' do not apply to the controls of 'scaffold', so training can fail"
    done = call("run", *given, "method=scaffold+afl", "--out", "uneven")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == f"Note: scaffold+afl: {problem}; fair_controls=p applies them to both."
    assert "Note: " not in call("run", *given, "method=scaffold:fair_controls=p+afl", "--out", "even").out


@pytest.mark.parametrize("out", [[], ["--out", "here"]])
def test_resume_says_where_there_was_nothing_to_resume(call, tmp_path: Path, out: list[str]) -> None:
    first = call("run", *WORDS, "--resume", *out)
    assert (first.code, first.err) == (0, "")
    folder = Path(first.out.splitlines()[-1])
    assert first.out.splitlines()[0] == f"Note: {folder} has no rounds to resume from, so the run starts with round 1."
    before = read_files(tmp_path)
    again = call("run", *WORDS, "--resume", *out)  # finished
    assert again.code == 0
    assert "Note: " not in again.out
    assert read_files(tmp_path) == before


def test_a_run_without_out_is_resumed_in_its_default_folder(call, tmp_path: Path) -> None:
    class Stop(fedheal.Callback):
        def round(self, record: RoundRecord) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    folder = Path("runs") / quick(rounds=5).run_name
    for out in (folder, Path("runs/mine")):
        with pytest.raises(KeyboardInterrupt):
            fedheal.run(quick(rounds=5), tmp_path / out, callbacks=[Stop()], progress=False)
    done = call("run", *words("rounds=5"), "--resume")
    assert (done.code, done.err) == (0, "")
    assert "5 rounds, resumed after round 2" in done.out
    assert done.out.splitlines()[-1] == str(folder)
    named = call("run", "--resume", "name=mine")
    assert "5 rounds, resumed after round 2" in named.out
    assert named.out.splitlines()[-1] == "runs/mine"


def test_a_folder_is_enough_to_go_on(call, tmp_path: Path) -> None:
    """A run stopped after round 2 of 5; what decides nothing may be message anew."""
    whole = fedheal.run(quick(rounds=5, tau=0.4), tmp_path / "whole", progress=False)

    class Stop(fedheal.Callback):
        def round(self, record: RoundRecord) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedheal.run(quick(rounds=5, tau=0.4), tmp_path / "here", callbacks=[Stop()], progress=False)
    assert [p.name for p in (tmp_path / "here" / "state").iterdir()] == ["00000002.safetensors"]
    done = call("run", "--resume", "--out", "here", "save_seconds=5", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["domains"] == dict(whole.domains)
    assert (tmp_path / "here/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    assert call("run", "--resume", "--out", "here", "--json").out == done.out  # it is finished


def test_a_folder_without_a_run_is_not_enough(call, tmp_path: Path) -> None:
    assert_sentence(call("run", "--resume", "--out", "nowhere"), "nowhere holds no run to resume")
    assert_sentence(call("run", "--resume"), "runs/fedavg+fedheal-embedded-seed0 holds no run to resume", "--out")
    assert_sentence(call("run", "--resume", "name=mine"), "runs/mine holds no run to resume")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "begun").mkdir()
    assert_sentence(call("run", "--resume", "--out", "begun"), "leave out --resume to start one")
    (tmp_path / "begun" / "rounds.jsonl").touch()
    assert_sentence(
        call("run", "--resume", "--out", "begun"), "name another folder with --out, or remove what is there"
    )
    (tmp_path / "afile").touch()
    assert_sentence(call("run", "--resume", "--out", "afile"), "afile is a file: name another folder")


@pytest.mark.slow
def test_a_folder_does_not_stand_for_what_the_words_leave_out(call, tmp_path: Path) -> None:
    call("run", *WORDS, "--quiet", "--out", "here")
    assert_sentence(
        call("run", "rounds=3", "--out", "here", "--resume"),
        "here belongs to another experiment",
        "fields given with --resume describe the whole experiment; use --resume --out here alone to resume what is there",
    )


def test_a_name_may_end_as_files_do_and_a_files_folder_may_have_an_equals_sign(call, tmp_path: Path) -> None:
    assert call("run", *WORDS, "name=x.toml", "--quiet").code == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["x.toml"]
    (tmp_path / "lr=0.05").mkdir()
    (tmp_path / "runs" / "x.toml" / "experiment.toml").rename(tmp_path / "lr=0.05" / "e.toml")
    assert call("run", "./lr=0.05/e.toml", "--quiet", "--out", "again").code == 0


def test_words_win_over_what_a_run_wrote_of_its_method(call, tmp_path: Path) -> None:
    call("run", *WORDS, "tau=0.2", "--quiet", "--out", "one")
    assert call("run", "one/experiment.toml", "tau=0.5", "--quiet", "--out", "two").code == 0
    assert "tau=0.5" in json.loads((tmp_path / "two" / "result.json").read_text())["method"]


def test_a_module_that_exits_when_it_is_imported_is_a_sentence(call, tmp_path: Path) -> None:
    (tmp_path / "exits_on_import.py").write_text("raise SystemExit(5)")
    done = call("run", *words("model=exits_on_import:net"))
    assert_sentence(done, "the model 'exits_on_import:net' cannot be imported: SystemExit: 5")


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_input_is_a_sentence_and_nothing_is_written(
    call, tmp_path: Path, words: list[str], message: list[str]
) -> None:
    assert_sentence(call("run", *WORDS, *words), *message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds = \n", "not TOML"),
        (b"rounds = 3\nrounds = 4\n", "not TOML"),
        (b'name = "\xe9t\xe9"\n', "not TOML: byte 8 is not UTF-8; save it as UTF-8"),
        (b"\x00\x01\x02", "not TOML"),
        (b"\xff\xfer\x00o\x00", "not TOML"),
        (b"[rounds]\nx = 1\n", "rounds"),
        (b"rounds = [1, 2]\n", "rounds"),
        (b"rounds = 2024-01-01\n", "rounds"),
        (b'rounds = "x\\ny"\n', "rounds"),
        (b"bogus = 1\n", "bogus"),
    ],
)
def test_an_unreadable_description_is_a_sentence(call, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    assert_sentence(call("run", "bad.toml"), message)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.toml"]


def test_a_run_that_used_no_update_says_so(call) -> None:
    done = call("run", *words("lr=1e30", "on_bad_update=skip", "rounds=2"), "--out", "here")
    assert done.code == 0, done.err
    assert "Note: in 2 of 2 rounds no client's update was used, so the model did not change." in done.out


def test_a_description_may_begin_with_a_byte_order_mark(call, tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_bytes(b"\xef\xbb\xbfseed = 7\n")
    done = call("run", "experiment.toml", *WORDS, "--quiet", "--out", "here")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "here" / "result.json").read_text())["seed"] == 7


def test_a_folder_of_another_experiment_is_refused_and_left_alone(call, tmp_path: Path) -> None:
    call("run", *WORDS, "--quiet", "--out", "here")
    before = read_files(tmp_path)
    for extra in ([], ["--resume"]):
        assert_sentence(call("run", *WORDS, "seed=1", "--out", "here", *extra), "here", "another experiment")
    assert read_files(tmp_path) == before


def test_an_existing_run_needs_resume(call, tmp_path: Path) -> None:
    call("run", *WORDS, "--quiet", "--out", "here")
    before = read_files(tmp_path)
    assert_sentence(call("run", *WORDS, "--out", "here"), "here", "--resume")
    assert read_files(tmp_path) == before


@pytest.mark.parametrize("extra", [[], ["--resume"]])
def test_a_folder_that_is_no_run_is_refused_and_left_alone(call, tmp_path: Path, extra: list[str]) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "thesis.tex").write_text("important")
    assert_sentence(call("run", *WORDS, "--out", "here", *extra), "here", "not a run folder")
    assert read_files(tmp_path) == {"here/thesis.tex": b"important"}


def test_a_run_whose_description_is_damaged_is_refused_with_its_name(call, tmp_path: Path) -> None:
    call("run", *WORDS, "--quiet", "--out", "here")
    (tmp_path / "here" / "experiment.toml").write_text("rounds = ")
    before = read_files(tmp_path)
    assert_sentence(call("run", *WORDS, "--out", "here", "--resume"), "here/experiment.toml")
    assert read_files(tmp_path) == before


def test_a_diverging_run_is_a_sentence(call) -> None:
    done = call("run", *WORDS, "lr=1e30", "--quiet")
    assert_sentence(done, "training has diverged", "client 'dark-0'", "use a smaller lr")


def test_a_name_cannot_lead_out_of_the_runs_folder(call, tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    for name in ("..", "../../up", "/tmp/elsewhere", ".", "a/b"):
        call("run", *WORDS, "rounds=1", f'name="{name}"', "--quiet")
    assert {p.name for p in tmp_path.iterdir()} == {"inside", "runs"}
    assert all(p.is_dir() for p in (tmp_path / "runs").iterdir())


@pytest.mark.slow
def test_the_module_is_a_command_and_ascii_terminals_will_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedheal", "run", *WORDS, "name=plain"]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert CONTROL.search(done.stdout.decode("ascii")) is None
    assert "runs/plain" in done.stdout.decode("ascii")


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_go_on_and_does(call, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedheal", "run", *words("rounds=120", "save_seconds=0"), "--out", "here"]
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  (background jobs ignore it)
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "here" / "state").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in message
    assert "rerun the command to resume (fedheal run needs --resume)" in message
    stopped = len((tmp_path / "here" / "rounds.jsonl").read_text().splitlines())
    assert 0 < stopped < 120
    done = call(*command[3:], "--resume")
    assert (done.code, done.err) == (0, "")
    assert f"resumed after round {stopped}" in done.out
    whole = fedheal.run(quick(rounds=120, save_seconds=0), progress=False).model.state_dict()
    resumed = fedheal.load(tmp_path / "here").state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize("word", ["engine=lanes", "precision=bf16", "precision=tf32"])
def test_what_needs_a_gpu_is_said_before_anything_is_written(call, word: str) -> None:
    assert_sentence(call("run", *WORDS, word, "--out", "here"), word.partition("=")[0], "needs a GPU")
    assert not Path("here").exists()


def test_more_threads_and_workers_than_the_processors_can_run_are_refused(call, monkeypatch) -> None:
    monkeypatch.setattr(engine, "count_cores", lambda: 2)
    assert call("run", *WORDS, "rounds=1", "threads=8", "--out", "eight").code == 0
    assert_sentence(call("run", *WORDS, "threads=9", "--out", "here"), "threads = 9", "2 processors", "at most 8")
    many = call("run", *WORDS, "threads=3", "workers=3", "device=cpu", "--out", "here")
    assert_sentence(many, "workers = 3 with 3 threads each", "at most 2")
    assert_sentence(call("compare", "fedavg", "fedheal", "threads=9", "--out", "here"), "threads = 9")
    assert not Path("here").exists()


def test_more_rounds_than_anyone_waits_for_are_refused(call) -> None:
    assert_sentence(call("run", *WORDS, "rounds=99999999999999999999999"), "rounds = 99999999999999999999999")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--ray", "127.0.0.1:1"], "no Ray cluster answers at '127.0.0.1:1'"),
        (["engine=ray", "ray_address=127.0.0.1:1"], "no Ray cluster answers at '127.0.0.1:1'"),
        (["--ray", "auto", "engine=serial"], "'engine' is given twice: engine=serial and engine=ray"),
        (["--workers", "2", "workers=1"], "'workers' is given twice"),
        (["workers=0"], "workers = 0: use a number of at least 1"),
        (["ray_address=auto"], "ray_address = 'auto' needs engine=ray"),
    ],
)
def test_a_run_that_cannot_use_a_cluster_is_a_sentence(call, tmp_path: Path, more: list[str], said: str) -> None:
    assert_sentence(call("run", *WORDS, *more, "--out", tmp_path / "run"), said)
    assert not (tmp_path / "run").exists()


def test_without_ray_a_run_says_how_to_install_it(call, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = call("run", *WORDS, "--ray", "auto", "--out", tmp_path / "run")
    assert_sentence(done, "Ray is not installed: run pip install '.[ray]' in a checkout of fedheal")
    assert not (tmp_path / "run").exists()


def test_a_run_on_a_cluster_is_resumed_at_another_address(call, tmp_path: Path) -> None:
    """Neither the address nor the number of workers is part of the experiment."""
    begun = quick(engine="ray", ray_address="127.0.0.1:1")
    assert begun.identity == quick(engine="ray", ray_address="127.0.0.1:2", workers=3).identity
    assert begun.workers == 0  # as many as the cluster has room for
    (tmp_path / "experiment.toml").write_text(begun.to_toml())
    done = call("run", "--resume", "--ray", "127.0.0.1:2", "--workers", "3", "--out", tmp_path)
    assert_sentence(done, "no Ray cluster answers at '127.0.0.1:2'")
