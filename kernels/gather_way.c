/* Which way gather takes from a table in the memory of the host.
 *
 * Each way's time is that of what it is bound by: the bytes over the bus, or the rows that the
 * device, or the threads, can ask for in a second. The device's own work on what is there, and the
 * way of the indices, are the same for all of them, and short. */
#include "gather_way.h"

#include <math.h>

/* Of a machine that was not measured: the bus is PCIe 5, as slower ones slow all ways that use it
 * alike; a thread copies so much into page-locked buffers, and gathers rows at so much for each of
 * them and for each of their bytes. */
#define BUS_BYTES_PER_SECOND 50e9
#define COPIED_BYTES_PER_SECOND 8e9
#define SECONDS_PER_ROW 40e-9
#define GATHERED_BYTES_PER_SECOND 3e9
#define MOST_GATHERING 16

/* What the device can ask for over the bus, whatever the rows' length. This, and what follows of
 * rows in place, was measured on an H200. */
#define ROWS_IN_PLACE_PER_SECOND 600e6
/* It knows the addresses of so much of the host's memory, and looks up others, each of a page, at
 * this rate. */
#define KNOWN_BYTES 700e6
#define PAGE_BYTES 65536.0
#define LOOKED_UP_PER_SECOND 38e6
/* Sorted rows are in order by parts of the table, of which several are read at a time. */
#define LOOKED_UP_AGAIN 1.3
#define SECONDS_TO_SORT 20e-6
#define ROWS_SORTED_PER_SECOND 5e9
/* To wait for the device, and fetch indices from it. */
#define SECONDS_TO_FETCH 20e-6
/* What a window costs beside its bytes, and the rows that a kernel sees not to be in it. */
#define SECONDS_PER_WINDOW 20e-6
#define ROWS_LOOKED_AT_PER_SECOND 20e9
/* A scan shall read no more than one byte for so many that go up. */
#define TABLE_BYTES_PER_INDEX_BYTE 8

enum { BUFFERS = 2 }; /* of windows: one goes up while the other is gathered from */

static double longer(double one, double other)
{
    return one > other ? one : other;
}

void gather_guess_rates(int threads, GatherRates *rates)
{
    const int gathering = threads < MOST_GATHERING ? threads : MOST_GATHERING;
    rates->byte_up = 1 / BUS_BYTES_PER_SECOND;
    rates->byte_copied_up = longer(rates->byte_up, 1 / (threads * COPIED_BYTES_PER_SECOND));
    rates->host_row = SECONDS_PER_ROW / gathering;
    rates->host_byte = 1 / (GATHERED_BYTES_PER_SECOND * gathering);
}

static double seconds_up(const GatherCase *given)
{
    const GatherRates *rates = &given->rates;
    /* Page-locked memory takes no thread. */
    return (double)given->range_bytes *
           (given->is_reachable ? rates->byte_up : rates->byte_copied_up);
}

/* Each window is looked at for all rows. */
static double seconds_of_windows(const GatherCase *given)
{
    const double windows = (double)given->range_bytes / ((double)given->room_bytes / BUFFERS);
    const double each = SECONDS_PER_WINDOW + (double)given->rows / ROWS_LOOKED_AT_PER_SECOND;
    return longer(seconds_up(given), windows * each);
}

static double seconds_of_rows(const GatherCase *given)
{
    return (double)given->rows * (double)given->row_bytes * given->rates.byte_up;
}

static double seconds_of_known_rows(const GatherCase *given)
{
    return longer(seconds_of_rows(given), (double)given->rows / ROWS_IN_PLACE_PER_SECOND);
}

static double seconds_of_lookups(const GatherCase *given, double pages)
{
    const double unknown = 1 - KNOWN_BYTES / longer((double)given->span_bytes, KNOWN_BYTES);
    return pages * unknown / LOOKED_UP_PER_SECOND;
}

/* As they come, from anywhere in the table, each has a page of its own. */
static double seconds_unsorted(const GatherCase *given)
{
    return longer(seconds_of_known_rows(given), seconds_of_lookups(given, (double)given->rows));
}

/* Those that follow one another share a page, of which some are met by none. */
static double seconds_sorted(const GatherCase *given)
{
    const double pages = (double)given->span_bytes / PAGE_BYTES;
    const double met = -pages * expm1(-(double)given->rows / pages);
    return longer(seconds_of_known_rows(given), LOOKED_UP_AGAIN * seconds_of_lookups(given, met));
}

static double seconds_to_sort(const GatherCase *given)
{
    return SECONDS_TO_SORT + (double)given->rows / ROWS_SORTED_PER_SECOND;
}

bool gather_sorting_pays(const GatherCase *given)
{
    return given->result_on_device && given->row_bytes > GATHER_WORD_BYTES &&
           seconds_to_sort(given) + seconds_sorted(given) < seconds_unsorted(given);
}

static double seconds_in_place(const GatherCase *given)
{
    return gather_sorting_pays(given) ? seconds_to_sort(given) + seconds_sorted(given)
                                      : seconds_unsorted(given);
}

static double seconds_on_host(const GatherCase *given)
{
    const GatherRates *rates = &given->rates;
    const double row = rates->host_row + (double)given->row_bytes * rates->host_byte;
    double seconds = longer(seconds_of_rows(given), (double)given->rows * row);
    if (given->indices_on_device)
        seconds += SECONDS_TO_FETCH + (double)given->index_bytes * rates->byte_up;
    return seconds;
}

double gather_seconds(const GatherCase *given, GatherWay way)
{
    switch (way) {
    case GATHER_WINDOWS:
        return seconds_of_windows(given);
    case GATHER_IN_PLACE:
        return seconds_in_place(given);
    case GATHER_ON_HOST:
        return seconds_on_host(given);
    default:
        return seconds_up(given);
    }
}

GatherPlan gather_way(const GatherCase *given)
{
    const bool fits = given->range_bytes <= given->room_bytes;
    const bool is_range = given->range_bytes < given->table_bytes;
    GatherPlan best = {!fits      ? GATHER_WINDOWS
                       : is_range ? GATHER_RANGE
                                  : GATHER_WHOLE,
                       given->range_bytes};
    if (fits && given->table_bytes <= GATHER_LEAST_CHOICE_BYTES) return best;

    double seconds = seconds_up(given);
    /* Results on the host are made in parts where there is no room for a place either. */
    bool is_possible =
        fits || !given->result_on_device || given->place_bytes <= given->room_bytes / BUFFERS;
    if (!fits && given->result_on_device && is_possible) seconds = seconds_of_windows(given);
    if (given->is_reachable && (!is_possible || seconds_in_place(given) < seconds)) {
        best = (GatherPlan){GATHER_IN_PLACE, given->rows * given->row_bytes};
        seconds = seconds_in_place(given);
        is_possible = true;
    }
    if (given->result_on_device && (!is_possible || seconds_on_host(given) < seconds))
        best = (GatherPlan){GATHER_ON_HOST, given->rows * given->row_bytes};
    return best;
}

bool gather_scan_pays(const GatherCase *given)
{
    return given->index_bytes <= given->table_bytes / TABLE_BYTES_PER_INDEX_BYTE;
}
