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

typedef struct GatherCase {
    int64_t table_bytes;
    int64_t range_bytes;     /* from the first place that is taken to the last, or of the table */
    int64_t place_bytes;     /* of one place of the axis, the least that goes up at a time */
    int64_t rows, row_bytes; /* that are taken, each in one piece */
    int64_t index_bytes;
    int64_t room_bytes;    /* in the memory of the device, for the table */
    int threads;           /* that this process may use */
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

/* The way that is expected to take the shortest time. */
GatherPlan gather_way(const GatherCase *given);

/* Whether to look at all indices for the range of places that they mean takes little time beside
 * sending the table up. */
bool gather_scan_pays(const GatherCase *given);

#ifdef __cplusplus
}
#endif

#endif
