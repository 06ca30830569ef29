"""One script over several sizes: its table, peaks and picture."""

import subprocess
import sys

import pytest
from conftest import ROOT

import sweep
from common.flags import one_by_one
from common.speed import Roof
from tracereader.command import BadInput

RUNG_1 = str(ROOT / "01_matmul_add.py")


@pytest.fixture
def swept(compile_afresh, tmp_path):
    """Return a function: swept("--size", "8", "16") -> exit status; files are written under tmp_path."""

    def run(*flags, script=RUNG_1):
        return sweep.main([script, *flags, "--device", "cpu", "--out", str(tmp_path)])

    return run


def test_sweep_on_the_cpu(swept, tmp_path, capsys):
    assert swept("--size", "32", "8", "16", "--warmup") == 0
    screen = capsys.readouterr()
    bound = ("overhead", "compute", "memory", "neither")  # by the time that it took here
    rows = [line.split() for line in screen.out.splitlines() if line.endswith(bound)]
    assert [row[0] for row in rows] == ["8", "16", "32"]
    assert not any("–" in row for row in rows), "a CPU has its rates, too"
    assert "peaks of this machine" in screen.out
    assert "predictions hold" not in screen.out, "no report of each"
    assert screen.err == ""
    assert {file.stem.removesuffix("_cpu") for file in tmp_path.rglob("*.json")} == {
        f"{size}_bf16_warm_eager_shapes" for size in (8, 16, 32)
    }
    (picture,) = tmp_path.rglob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.name in screen.out
    assert not list(tmp_path.rglob(".unfinished*"))


def test_any_integer_flag_can_be_swept(swept, tmp_path):
    small = ("--batch", "2", "--dim", "8", "--hidden", "16")
    assert swept("--seq", "4", "8", *small, script=str(ROOT / "03_simple_mlp.py")) == 0
    assert len(list(tmp_path.rglob("2x*x8x16_*.json"))) == 2


def test_sweep_without_matplotlib_still_has_its_table(swept, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert swept("--size", "8", "16") == 0
    screen = capsys.readouterr().out
    assert "CPU µs" in screen
    assert "uv run --extra plot" in screen
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize("flag", ["--guess", "--open", "--lanes", "--step", "--only=steps"])
def test_flags_for_one_run_are_refused_in_a_sweep(swept, capsys, flag):
    assert swept("--size", "8", "16", flag) == 2
    assert "is for one run" in capsys.readouterr().err


def test_one_flag_takes_several_whole_numbers():
    name, argvs = one_by_one(["--warmup", "--size", "8", "16", "--dtype", "fp32"])
    assert name == "--size"
    assert argvs == {
        8: ["--warmup", "--size", "8", "--dtype", "fp32"],
        16: ["--warmup", "--size", "16", "--dtype", "fp32"],
    }


@pytest.mark.parametrize("flags", ["", "--size 8", "--size 8 16 --batch 2 4", "--size 8 four", "8 16"])
def test_none_or_two_such_flags_are_refused(flags):
    with pytest.raises(BadInput, match="one flag takes several whole numbers"):
        one_by_one(flags.split())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "required: SCRIPT"),
        ("01_matmul_add.py --size 8", "one flag takes several"),
        ("no_such.py --size 8 16", "there is no script"),
        ("01_matmul_add.py --size 8 16 --dtype int8", "invalid choice"),
        ("01_matmul_add.py --size 0 16", "too small"),
        ("01_matmul_add.py --size 8 16 --guess", "is for one run"),
    ],
)
def test_refused_in_one_line_before_torch_is_loaded(flags, says):
    program = (
        "import sys, sweep\nstatus = sweep.main(sys.argv[1:])\nassert 'torch' not in sys.modules\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program, *flags.split()], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def point(value, cpu, busy, gb_s=None):
    return sweep.Point(value, cpu, busy, "", None, None, None, gb_s)


def test_crossing_lies_between_the_points_that_differ():
    assert sweep.crossing([point(100, 50, 5), point(1000, 50, 500)]) == pytest.approx(100 * 10**0.5)
    assert sweep.crossing([point(100, 50, 5), point(1000, 50, 20)]) is None
    assert sweep.crossing([point(100, 50, 0), point(1000, 50, 0)]) is None
    assert sweep.crossing([point(0, 50, 5), point(3, 50, 500)]) is None, "from nothing no logarithm leads on"


def test_no_point_is_above_its_peak(scripts):
    from common.harness import prepare

    args = prepare(scripts["01_matmul_add"].flags(["--device", "cpu"]))
    compute, memory = sweep.roofs(args, [point(8, 1, 1, gb_s=1e6)], "size")
    assert memory.rate == 1e6 and "size 8" in memory.reached_by
    assert compute.rate > 0 and "product" in compute.reached_by


def test_a_cpus_point_has_its_traces_bound():
    folder = ROOT / "traces/reference/cpu"
    shapes = folder / "03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz"
    small = sweep.Point.of(64, folder / "01_matmul_add/64_bf16_warm_eager.json.gz")
    neither = sweep.Point.of(8, folder / "04_c_sdpa_attention/8x16x1024x64_bf16_warm_eager_flash_shapes.json.gz")
    near = sweep.Point.of(128, shapes)
    assert [one.bound_by for one in (near, small, neither)] == ["compute", "overhead", "neither"]


def test_a_point_is_read_from_its_trace():
    trace = ROOT / "traces/reference/nvidia-h200/01_matmul_add/4096_bf16_warm_eager_shapes.json.gz"
    one = sweep.Point.of(4096, trace)
    assert one.bound_by == "compute"
    assert 500 < one.tflops < 990, "of an H200's 989"
    assert 1000 < one.gb_s < 4800, "of an H200's 4800"
    assert 0 < one.pointwise_share < 0.5


def test_the_table_is_one_at_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    folder = ROOT / "traces/reference/nvidia-h200"
    large = folder / "03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz"
    points = [sweep.Point.of(64, folder / "01_matmul_add/64_bf16_warm_eager.json.gz"), sweep.Point.of(8192, large)]
    sweep.show("size", points, Roof(816, "a product"), Roof(4363, "a copy"))
    head, *rows = capsys.readouterr().out.splitlines()[1:4]
    assert head.split()[:4] == ["size", "CPU", "µs", "GPU"] and head.endswith("bound by")
    assert [row.split()[0] for row in rows] == ["64", "8192"] and max(map(len, [head, *rows])) <= 80


def test_the_picture_of_a_gpu_is_drawn(tmp_path):
    points = [point(64, 50, 5, 100.0), point(4096, 50, 300, 3000.0)]
    file = tmp_path / "sweep.png"
    sweep.picture(file, "title", "size", points, Roof(700, "a product"), Roof(4000, "a copy"))
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in tmp_path.iterdir()] == ["sweep.png"]


def test_a_measure_without_points_has_no_column_and_no_panel(tmp_path, capsys, monkeypatch):
    """The trace has neither shapes nor a product's rate for a CUDA graph's replay."""
    folder = ROOT / "traces/reference/nvidia-h200/05_llm"
    points = [sweep.Point.of(batch, folder / f"{batch}x512_bf16_warm_eager_graph.json.gz") for batch in (1, 32)]
    roofs = Roof(799, "a product"), Roof(4385, "a copy")
    sweep.show("batch", points, *roofs)
    head = capsys.readouterr().out.splitlines()[1]
    assert head.split() == ["batch", "CPU", "µs", "GPU", "µs", "idle", "pointwise", "bound", "by"]
    monkeypatch.setattr(sweep, "_draw_rates", lambda *_: pytest.fail("a panel of rates that nothing has"))
    sweep.picture(tmp_path / "sweep.png", "title", "batch", points, *roofs)
    assert (tmp_path / "sweep.png").is_file()
