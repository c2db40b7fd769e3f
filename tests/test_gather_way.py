"""Which way gather takes from a table on the host: arithmetic, in kernels/gather_way.c."""

import ctypes
import math
import random
import re
import shutil
import subprocess

import pytest
from operators import ROOT

WAYS = ["whole", "range", "windows", "in place", "on the host"]
MEBI = 1 << 20
GIBI = 1 << 30
BUFFERS = 2  # for windows, of which one is filled while the one before is read


class Rates(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_double) for name in ("byte_up", "byte_copied_up")),
        *((name, ctypes.c_double) for name in ("host_row", "host_byte")),
    ]


class Case(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("table_bytes", "range_bytes", "span_bytes")),
        ("place_bytes", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("rows", "row_bytes", "index_bytes", "room_bytes")),
        ("rates", Rates),
        *((name, ctypes.c_bool) for name in ("is_reachable", "result_on_device")),
        ("indices_on_device", ctypes.c_bool),
    ]


class Plan(ctypes.Structure):
    _fields_ = [("way", ctypes.c_int), ("bytes_up", ctypes.c_int64)]


def constant(name):
    """The number that the source has for it, so that tests follow when it is tuned."""
    for file in ("gather_way.c", "gather_way.h"):
        text = (ROOT / "kernels" / file).read_text()
        for value in re.findall(rf"^#define {name} (.+)$", text, re.MULTILINE):
            return eval(value.replace("(int64_t)", ""))
    raise KeyError(name)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    built = tmp_path_factory.mktemp("way") / "gather_way.so"
    source = ROOT / "kernels" / "gather_way.c"
    subprocess.run(
        [compiler, "-std=c11", "-shared", "-fPIC", "-o", str(built), str(source)], check=True
    )
    library = ctypes.CDLL(str(built))
    library.gather_way.argtypes = library.gather_scan_pays.argtypes = [ctypes.POINTER(Case)]
    library.gather_way.restype = Plan
    library.gather_sorting_pays.argtypes = library.gather_way.argtypes
    library.gather_scan_pays.restype = library.gather_sorting_pays.restype = ctypes.c_bool
    library.gather_guess_rates.argtypes = [ctypes.c_int, ctypes.POINTER(Rates)]
    library.gather_seconds.argtypes = [ctypes.POINTER(Case), ctypes.c_int]
    library.gather_seconds.restype = ctypes.c_double
    return library


def case_of(library, **given):
    """1 Mi rows of 1 KiB, on a machine with 16 cores and much room, unless something else is
    given. It was not measured, unless rates are given."""
    rates = Rates()
    library.gather_guess_rates(given.pop("threads", 16), rates)
    given = {"place_bytes": 1 << 10, "row_bytes": 1 << 10, "rates": rates} | given
    given = {"table_bytes": given["place_bytes"] << 20, "room_bytes": 1 << 60} | given
    given = {"range_bytes": given["table_bytes"], "rows": 1 << 20} | given
    given = {"span_bytes": given["range_bytes"]} | given
    return Case(**{"index_bytes": 8 * given["rows"], **given})


@pytest.fixture
def way_of(library):
    def way_of(**given):
        plan = library.gather_way(case_of(library, **given))
        return WAYS[plan.way], plan.bytes_up

    return way_of


EVERYWHERE = [
    {"is_reachable": reachable, "result_on_device": result, "indices_on_device": indices}
    for reachable in (False, True)
    for result in (False, True)
    for indices in (False, True)
]


@pytest.mark.parametrize("where", EVERYWHERE)
def test_a_table_that_is_taken_as_a_whole_goes_up_as_a_whole(way_of, where):
    assert way_of(rows=2 << 20, **where) == ("whole", GIBI)


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("rows", [1, 1 << 40])
def test_a_small_table_goes_up_as_a_whole(way_of, where, rows):
    least = constant("GATHER_LEAST_CHOICE_BYTES")
    assert way_of(table_bytes=least, rows=rows, **where) == ("whole", least)
    chosen, _ = way_of(table_bytes=least + 1, rows=1, room_bytes=least + 1, **where)
    assert (chosen == "whole") != (where["is_reachable"] or where["result_on_device"])


def test_what_there_is_no_room_for_goes_up_in_windows(way_of):
    assert way_of(rows=2 << 20, room_bytes=GIBI) == ("whole", GIBI)
    assert way_of(rows=2 << 20, room_bytes=GIBI - 1) == ("windows", GIBI)
    given = {"rows": 2 << 20, "range_bytes": 600 * MEBI}
    assert way_of(**given, room_bytes=600 * MEBI) == ("range", 600 * MEBI)
    assert way_of(**given, room_bytes=600 * MEBI - 1) == ("windows", 600 * MEBI)


@pytest.mark.parametrize("reachable", [False, True])
def test_where_no_window_fits(way_of, reachable):
    """Two of them are there at a time. A result on the host is made in parts."""
    place = GIBI // 4
    given = {"place_bytes": place, "table_bytes": GIBI, "row_bytes": place, "rows": 8}
    given |= {"is_reachable": reachable}
    on_device = {**given, "result_on_device": True}
    assert way_of(**on_device, room_bytes=2 * place) == ("windows", GIBI)
    taken = "in place" if reachable else "on the host"
    assert way_of(**on_device, room_bytes=2 * place - 1) == (taken, 2 * GIBI)
    assert way_of(**given, room_bytes=0) == ("windows", GIBI)


@pytest.mark.parametrize("reachable", [False, True])
def test_a_multitude_of_windows_takes_longer_than_the_rows(way_of, reachable):
    given = {"rows": 2 << 20, "is_reachable": reachable, "result_on_device": True}
    taken = "in place" if reachable else "on the host"
    assert way_of(**given, room_bytes=256 * MEBI) == ("windows", GIBI)
    assert way_of(**given, room_bytes=64 << 10) == (taken, 2 * GIBI)


@pytest.mark.parametrize("indices_on_device", [False, True])
def test_few_rows_are_gathered_without_the_others(way_of, indices_on_device):
    given = {"rows": 1000, "indices_on_device": indices_on_device}
    assert way_of(**given) == ("whole", GIBI)  # the result would have to come back
    assert way_of(**given, result_on_device=True) == ("on the host", 1000 << 10)
    assert way_of(**given, is_reachable=True) == ("in place", 1000 << 10)
    assert way_of(**given, is_reachable=True, result_on_device=True) == ("in place", 1000 << 10)


def test_the_price_of_what_is_not_there(way_of):
    """Indices are fetched only where that pays, and few threads gather more slowly."""
    table = 3 * MEBI // 2
    given = {"table_bytes": table, "rows": 16, "result_on_device": True}
    assert way_of(**given) == ("on the host", 16 << 10)
    assert way_of(**given, indices_on_device=True)[0] == "on the host"
    assert way_of(**given | {"rows": 900}, indices_on_device=True) == ("whole", table)
    many = {"rows": 1 << 19, "result_on_device": True, "table_bytes": 4 * GIBI}
    assert way_of(**many)[0] == "on the host"
    assert way_of(**many | {"threads": 1}, is_reachable=True)[0] == "in place"
    narrow = {"rows": 1 << 20, "row_bytes": 4, "place_bytes": 4, "result_on_device": True}
    narrow["table_bytes"] = 512 * MEBI
    assert way_of(**narrow)[0] == "on the host"
    assert way_of(**narrow, is_reachable=True)[0] == "in place"
    assert way_of(**narrow | {"threads": 1})[0] == "on the host"
    assert way_of(**narrow | {"threads": 1, "rows": 2 << 20})[0] == "whole"
    large = narrow | {"table_bytes": 4 * GIBI, "is_reachable": True}
    assert way_of(**large)[0] == "on the host"
    assert way_of(**large | {"threads": 1})[0] == "in place"


def test_a_range_goes_up_where_that_is_known(way_of):
    given = {"rows": 1000, "range_bytes": 4 << 10}
    assert way_of(**given) == ("range", 4 << 10)
    assert way_of(**given, result_on_device=True) == ("range", 4 << 10)
    assert way_of(**given, is_reachable=True) == ("range", 4 << 10)


def test_a_scan_reads_little_beside_what_goes_up(library):
    share = constant("TABLE_BYTES_PER_INDEX_BYTE")
    assert library.gather_scan_pays(case_of(library, index_bytes=GIBI // share))
    assert not library.gather_scan_pays(case_of(library, index_bytes=GIBI // share + 1))


def test_sorting_pays_for_many_rows_of_more_than_the_device_knows(library):
    def pays(**given):
        given = {"row_bytes": 512, "span_bytes": 4 * GIBI, "result_on_device": True} | given
        return library.gather_sorting_pays(case_of(library, is_reachable=True, **given))

    assert pays()
    assert pays(span_bytes=2 * GIBI) and not pays(span_bytes=int(constant("KNOWN_BYTES")))
    word = constant("GATHER_WORD_BYTES")
    assert pays(row_bytes=word + 1) and not pays(row_bytes=word)
    assert not pays(row_bytes=4096)  # which take longer over the bus than to be looked up
    assert not pays(result_on_device=False)
    assert not pays(rows=100)


def test_sorted_rows_are_as_fast_as_those_of_a_small_table_where_they_share_pages(library):
    def seconds(**given):
        case = case_of(library, row_bytes=512, is_reachable=True, **given)
        return library.gather_seconds(case, WAYS.index("in place"))

    small = seconds(span_bytes=GIBI // 2)
    to_sort = constant("SECONDS_TO_SORT") + (1 << 20) / constant("ROWS_SORTED_PER_SECOND")
    assert seconds(span_bytes=4 * GIBI, result_on_device=True) == pytest.approx(small + to_sort)
    assert seconds(span_bytes=4 * GIBI) > 2 * small
    far = seconds(span_bytes=64 * GIBI, result_on_device=True)
    assert small + to_sort < far < seconds(span_bytes=64 * GIBI)


def test_a_page_is_looked_up_once_for_all_its_rows(library):
    """Of 4 GiB, by few rows from anywhere and by so many that they meet every page."""
    pages, known = 4 * GIBI / constant("PAGE_BYTES"), constant("KNOWN_BYTES")
    lookup = (1 - known / (4 * GIBI)) / constant("LOOKED_UP_PER_SECOND")

    def seconds(rows):
        case = case_of(library, row_bytes=32, rows=rows, span_bytes=4 * GIBI, is_reachable=True,
                       result_on_device=True)  # fmt: skip
        return library.gather_seconds(case, WAYS.index("in place"))

    assert seconds(1000) == pytest.approx(1000 * lookup)
    to_sort = constant("SECONDS_TO_SORT") + (1 << 20) / constant("ROWS_SORTED_PER_SECOND")
    again = constant("LOOKED_UP_AGAIN")
    assert seconds(1 << 20) - to_sort == pytest.approx(again * pages * lookup, rel=1e-4)
    to_sort = constant("SECONDS_TO_SORT") + pages / constant("ROWS_SORTED_PER_SECOND")
    assert seconds(int(pages)) - to_sort == pytest.approx(again * pages * lookup * (1 - 1 / math.e))


def test_the_rates_of_the_machine_decide(way_of):
    """A quarter of a million rows of 4 bytes each, from 64 MiB."""
    given = {"place_bytes": 4, "row_bytes": 4, "table_bytes": 64 * MEBI, "rows": 1 << 18}
    given["result_on_device"] = True
    for row, byte, way in [(1e-9, 2e-11, "on the host"), (1e-8, 2e-11, "whole")]:
        rates = Rates(byte, byte, row, 0)
        assert way_of(**given, rates=rates)[0] == way
    # What is page-locked goes up without the threads.
    rates = Rates(1e-12, 1e-9, 1e-9, 0)
    assert way_of(**given, rates=rates)[0] == "on the host"
    assert way_of(**given, rates=rates, is_reachable=True)[0] == "whole"


def test_the_way_that_is_taken_takes_the_least(library):
    given = {"result_on_device": True, "is_reachable": True, "row_bytes": 64, "place_bytes": 64}
    for rows in (1 << power for power in range(4, 26, 3)):
        case = case_of(library, **given, rows=rows)
        plan = library.gather_way(case)
        seconds = {way: library.gather_seconds(case, WAYS.index(way)) for way in WAYS}
        del seconds["windows"], seconds["range"]
        assert seconds[WAYS[plan.way]] == min(seconds.values())


@pytest.mark.parametrize("where", EVERYWHERE)
def test_more_room_makes_no_other_way_better_than_those_that_need_none(library, where):
    """So how much there is need not be known where all there could be changes nothing."""
    generator = random.Random(5)
    found = set()
    for _ in range(3000):
        width, places = 1 << generator.randrange(2, 16), 1 << generator.randrange(8, 22)
        given = {
            **where,
            "place_bytes": width,
            "row_bytes": width,
            "rows": 1 << generator.randrange(24),
        }
        lying, packed = width * places // generator.randrange(1, 5), width * places
        most = {**given, "table_bytes": lying, "room_bytes": 1 << 62}
        way = library.gather_way(case_of(library, **most)).way
        if WAYS[way] not in ("in place", "on the host"):
            continue
        found.add(WAYS[way])
        for room in (0, width, 3 * width, lying // 2, lying, packed // 2, packed):
            less = {**given, "table_bytes": lying if lying <= room else packed, "room_bytes": room}
            assert library.gather_way(case_of(library, **less)).way == way, less
    assert found or not where["result_on_device"]


def test_a_small_table_of_which_no_window_has_room_is_gathered_on_the_host(way_of):
    least = constant("GATHER_LEAST_CHOICE_BYTES")
    given = {"table_bytes": least, "place_bytes": least, "rows": 10, "result_on_device": True}
    assert way_of(**given, room_bytes=least - 1) == ("on the host", 10 << 10)


def seconds_of(library, way, **given):
    case = case_of(library, **given)
    return library.gather_seconds(ctypes.byref(case), WAYS.index(way))


def test_windows_take_a_look_at_all_rows_each(library):
    windows = BUFFERS * GIBI / MEBI
    each = constant("SECONDS_PER_WINDOW")
    looked_at = 1e9 / constant("ROWS_LOOKED_AT_PER_SECOND")
    for rows, expected in [(0, each), (10**9, each + looked_at)]:
        found = seconds_of(library, "windows", rows=rows, room_bytes=MEBI, is_reachable=True)
        assert math.isclose(found, windows * expected)


def test_windows_take_no_less_than_the_way_up(library):
    given = {"rows": 1, "room_bytes": GIBI // 2}
    assert seconds_of(library, "windows", **given) == seconds_of(library, "whole", **given)


def test_indices_on_the_device_are_fetched(library):
    given = {"rows": 1 << 20, "index_bytes": 8 * MEBI}
    there = seconds_of(library, "on the host", indices_on_device=True, **given)
    rates = case_of(library).rates
    fetched = constant("SECONDS_TO_FETCH") + 8 * MEBI * rates.byte_up
    assert math.isclose(there, fetched + seconds_of(library, "on the host", **given))


def test_rows_gathered_at_once_take_the_way_up(library):
    rates = Rates(byte_up=1e-10, byte_copied_up=1e-10, host_row=0, host_byte=0)
    assert math.isclose(seconds_of(library, "on the host", rates=rates), GIBI * 1e-10)


def test_no_more_threads_gather_than_is_of_use(library):
    few, many = (case_of(library, threads=n).rates for n in (constant("MOST_GATHERING"), 1000))
    assert (few.host_row, few.host_byte) == (many.host_row, many.host_byte)
