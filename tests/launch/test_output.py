import fcntl
import itertools
import os
import pty

import pytest

from asynccoll.launch.output import MAX_LINE, PROGRESS_INTERVAL, Lines, Output, prefix_of


def feed_all(lines: Lines, data: bytes, step: int) -> bytes:
    written = b"".join(lines.feed(data[i : i + step], 0.0) for i in range(0, len(data), step))
    return written + lines.close()


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_lines_do_not_depend_on_how_the_bytes_arrive(step):
    data = b"one\n\ntwo \xff\x00\nwindows\r\nlast"
    assert feed_all(Lines(b"[0] ", live=False), data, step).replace(b"[0] ", b"|") == (
        b"|one\n|\n|two \xff\x00\n|windows\n|last\n"
    )


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_without_a_prefix_bytes_pass_unchanged(step):
    data = b"one\r\n\n 10%\r 20%\r\n\xff\x00 last"
    assert feed_all(Lines(None, live=False), data, step) == data


def test_without_a_prefix_part_of_a_line_is_held_back():
    lines = Lines(None, live=False)
    assert lines.feed(b"one\ntw", 0.0) == b"one\n"
    assert lines.feed(b"o\n", 0.0) == b"two\n"


@pytest.mark.parametrize("bar", [b" 10%\r 20%\r 30%\n", b"\r 10%\r 20%\r 30%\n"])
@pytest.mark.parametrize("step", [1, 5, 1000])
def test_the_last_state_of_a_progress_bar_is_its_line(bar, step):
    lines = Lines(b"> ", live=True)
    assert feed_all(lines, bar + b"done\n", step) == b">  30%\n> done\n"


def test_on_a_terminal_every_state_of_a_progress_bar_is_an_update():
    lines = Lines(b"> ", live=True)
    assert (lines.feed(b"\r 10%", 0.0), lines.update) == (b"", b">  10%")
    assert (lines.feed(b"\r 2", 0.0), lines.update) == (b"", b">  2")
    assert (lines.feed(b"0%", 0.0), lines.update) == (b"", b">  20%")
    assert (lines.feed(b"\n", 0.0), lines.update) == (b">  20%\n", None)
    assert (lines.feed(b"plain", 0.0), lines.update) == (b"", None)


def test_a_bar_that_returns_after_its_text_is_an_update_too():
    lines = Lines(b"> ", live=True)
    assert (lines.feed(b"10%\r", 0.0), lines.update) == (b"", None)  # might be the end of a Windows line
    assert (lines.feed(b"20%\r", 0.0), lines.update) == (b"", b"> 20%")
    assert lines.close() == b"> 20%\n"


def test_elsewhere_one_state_in_an_interval_becomes_a_line():
    lines = Lines(b"> ", live=False)
    seen = [lines.feed(b"\r%d" % second, float(second)) for second in range(25)]
    assert lines.update is None
    shown = {second: text for second, text in enumerate(seen) if text}
    assert shown == {0: b"> 0\n", int(PROGRESS_INTERVAL): b"> 10\n", int(2 * PROGRESS_INTERVAL): b"> 20\n"}
    assert lines.close() == b"> 24\n"


@pytest.mark.parametrize("prefix", [b"> ", None])
def test_a_line_without_an_end_does_not_fill_memory(prefix):
    lines = Lines(prefix, live=False)
    chunk = b"x" * 65536
    written = b"".join(lines.feed(chunk, 0.0) for _ in range(40))
    assert len(written) >= 40 * 65536 - MAX_LINE - 65536
    assert (written + lines.close()).count(b"x") == 40 * 65536


def test_a_progress_bar_without_an_end_does_not_fill_memory():
    lines = Lines(b"> ", live=True)
    for _ in range(100):
        assert lines.feed(b"\r" + b"x" * 65536, 0.0) == b""
    assert lines.close() == b"> " + b"x" * 65536 + b"\n"


def test_a_closed_stream_without_a_rest_adds_nothing():
    lines = Lines(b"> ", live=False)
    lines.feed(b"all\n", 0.0)
    assert lines.close() == b""


def test_ranks_are_as_wide_as_the_widest():
    assert [prefix_of(rank, 11, colour=False) for rank in (0, 9, 10)] == [b"[ 0] ", b"[ 9] ", b"[10] "]
    assert prefix_of(9, 10, colour=False) == b"[9] "
    assert prefix_of(0, 1, colour=False) == b"[0] "


def test_neighbours_have_different_colours():
    prefixes = [prefix_of(rank, 8, colour=True) for rank in range(8)]
    colours = [prefix.partition(b"m")[0] for prefix in prefixes]
    assert all(a != b for a, b in itertools.pairwise(colours))
    assert all(prefix.endswith(b"\x1b[0m ") for prefix in prefixes)


def read_all(fd: int) -> bytes:
    data = b""
    while True:
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # a pseudo-terminal whose other side is closed
            chunk = b""
        if not chunk:
            os.close(fd)
            return data
        data += chunk


class Wires:
    """An `Output` for two ranks between pipes (or one terminal) that a test holds the ends of."""

    def __init__(self, *, terminal: bool = False, colour: bool = False, prefix: bool = True) -> None:
        self.broken = 0
        self.sources = [[os.pipe(), os.pipe()] for _ in range(2)]
        out = pty.openpty() if terminal else os.pipe()
        err = (out[0], os.dup(out[1])) if terminal else os.pipe()
        self.read_out, self.write_out = out
        self.read_err, self.write_err = err
        self.output = Output(
            2,
            prefix=prefix,
            colour=colour,
            on_broken=self.count,
            stdout=self.write_out,
            stderr=self.write_err,
        )
        for rank, ((out_source, _), (err_source, _)) in enumerate(self.sources):
            self.output.attach(rank, out_source, err_source)
        self.output.start()

    def count(self) -> None:
        self.broken += 1

    def write(self, rank: int, data: bytes, *, error: bool = False) -> None:
        os.write(self.sources[rank][error][1], data)

    def end(self) -> tuple[bytes, bytes]:
        self.output.finish()
        self.output.close()
        for rank in self.sources:
            for reader, writer in rank:
                os.close(reader)
                os.close(writer)
        os.close(self.write_out)
        os.close(self.write_err)
        out = read_all(self.read_out)
        return out, b"" if self.read_err == self.read_out else read_all(self.read_err)


def test_streams_stay_apart_and_whole():
    wires = Wires()
    wires.write(0, b"a\nb")
    wires.write(1, b"oops", error=True)
    out, err = wires.end()
    assert out == b"[0] a\n[0] b\n"
    assert err == b"[1] oops\n"


def test_a_notice_comes_after_what_its_rank_has_written():
    wires = Wires()
    wires.write(1, b"last words", error=True)
    wires.output.notice("rank 1 is gone", 1)
    assert wires.end()[1] == b"[1] last words\nrank 1 is gone\n"


def test_a_notice_comes_after_all_that_its_rank_has_written_however_much():
    wires = Wires()
    for fd in (wires.sources[1][1][1], wires.write_err):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)
    line = b"x" * 999 + b"\n"
    for _ in range(3):
        wires.write(0, line * 60)  # more than the thread can get rid of: from here on it waits for a reader
    wires.write(1, line * 300, error=True)
    wires.output.notice("rank 1 is gone", 1)
    lines = 0
    while lines < 180:
        lines += os.read(wires.read_out, 1 << 20).count(b"\n")
    seen = b""
    while not seen.endswith(b"gone\n"):
        seen += os.read(wires.read_err, 1 << 20)
    assert seen == (b"[1] " + line) * 300 + b"rank 1 is gone\n"
    wires.end()


def test_finish_does_not_wait_for_whoever_holds_the_pipes():
    wires = Wires()
    wires.write(0, b"said\n")
    wires.output.finish()
    wires.output._thread.join(timeout=30)
    assert not wires.output._thread.is_alive()
    assert wires.end()[0] == b"[0] said\n"


def test_a_reader_that_went_away_is_told_once_and_ranks_are_still_read():
    wires = Wires()
    os.close(wires.read_out)
    wires.read_out = os.dup(wires.read_err)
    for _ in range(64):
        wires.write(0, b"x" * 65535 + b"\n")  # would block if nobody read
    wires.write(1, b"y\n", error=True)
    wires.end()
    assert wires.broken == 1
    assert isinstance(wires.output.error, BrokenPipeError)


def test_a_target_that_does_not_block_loses_nothing():
    wires = Wires()
    os.set_blocking(wires.write_out, False)
    line = b"x" * 999 + b"\n"
    for _ in range(3):  # more than one pipe holds, less than the two on the way
        wires.write(0, line * 60)
    seen = b""
    while seen.count(b"\n") < 180:
        seen += os.read(wires.read_out, 65536)
    assert seen == (b"[0] " + line) * 180
    wires.end()


def test_on_a_terminal_an_update_has_a_row_that_lines_take_over():
    wires = Wires(terminal=True)
    wires.write(0, b"\r50%", error=True)
    assert os.read(wires.read_out, 100) == b"[0] 50%"
    wires.write(1, b"\r60%", error=True)
    assert os.read(wires.read_out, 100) == b"\r\x1b[K[1] 60%"
    wires.write(1, b"line\n")
    assert os.read(wires.read_out, 100) == b"\r\x1b[K[1] line\r\n"
    wires.write(0, b"\r70%", error=True)
    assert os.read(wires.read_out, 100) == b"[0] 70%"
    out, _ = wires.end()
    assert out == b"\r\x1b[K[0] 70%\r\n[1] 60%\r\n"


def test_colour_is_for_terminals_alone():
    wires = Wires(terminal=True, colour=True)
    wires.write(0, b"x\n")
    assert wires.end()[0] == b"\x1b[36m[0]\x1b[0m x\r\n"
    wires = Wires(colour=True)
    wires.write(0, b"x\n")
    assert wires.end()[0] == b"[0] x\n"
