/* Which way gather takes from a table in the memory of the host: arithmetic alone, in plain C. */
#ifndef GPUOPS_GATHER_WAY_H
#define GPUOPS_GATHER_WAY_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum GatherWay {
    GATHER_WHOLE,    /* the table goes up, and is gathered from there */
    GATHER_RANGE,    /* of the table, the places from the first that is taken to the last */
    GATHER_WINDOWS,  /* either of these, one part after the other, because there is no room */
    GATHER_IN_PLACE, /* the kernel reads the page-locked table over the bus */
    GATHER_ON_HOST,  /* threads gather the rows into page-locked buffers, which go up */
} GatherWay;

/* How fast the machine is: seconds, */
typedef struct GatherRates {
    double byte_up;        /* of a byte over the bus from page-locked memory, */
    double byte_copied_up; /* and from other memory, which threads copy there first; */
    double host_row;       /* of a row that the threads of the host gather, */
    double host_byte;      /* and of each of its bytes */
} GatherRates;

typedef struct GatherCase {
    int64_t table_bytes;
    int64_t range_bytes;     /* from the first place that is taken to the last, or of the table */
    int64_t span_bytes;      /* of the same as it lies, with what is between */
    int64_t place_bytes;     /* of one place of the axis, the least that goes up at a time */
    int64_t rows, row_bytes; /* that are taken, each in one piece */
    int64_t index_bytes;
    int64_t room_bytes; /* in the memory of the device, for the table */
    GatherRates rates;
    bool is_reachable;     /* the table is page-locked, and the device can read it in place */
    bool result_on_device; /* and not on the host */
    bool indices_on_device;
} GatherCase;

typedef struct GatherPlan {
    GatherWay way;
    int64_t bytes_up; /* over the bus, but for the indices */
} GatherPlan;

/* Below this nothing is won by another way than GATHER_WHOLE, if there is room. */
#define GATHER_LEAST_CHOICE_BYTES ((int64_t)1 << 20)

/* Rows in place that are no longer are read like elements, and as they come. */
#define GATHER_WORD_BYTES 16

/* The way that is expected to take the shortest time. */
GatherPlan gather_way(const GatherCase *given);

/* What a way is expected to take, but for the way of the indices and the device's own work on what
 * is there, which are the same for all. */
double gather_seconds(const GatherCase *given, GatherWay way);

/* Of a machine that was not measured, where a process may use so many threads. */
void gather_guess_rates(int threads, GatherRates *rates);

/* What is known of a device and the host, or guessed (route.c), for a table of so many bytes. */
void route_gather_rates(int device, double table_bytes, GatherRates *rates);

/* Whether rows in place are read sooner if they are sorted by where they lie. */
bool gather_sorting_pays(const GatherCase *given);

/* Whether to look at all indices for the range of places that they mean takes little time beside
 * sending the table up. */
bool gather_scan_pays(const GatherCase *given);

#ifdef __cplusplus
}
#endif

#endif
