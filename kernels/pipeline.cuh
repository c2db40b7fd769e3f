/* What pipeline.cu is told of the parts in which an operator goes through large arrays on the host.
 */
#ifndef GPUOPS_PIPELINE_CUH
#define GPUOPS_PIPELINE_CUH

#include "transfer.cuh"

/* Loops of which one is cut: a part is a stretch of that loop, with all loops inside it, at one
 * position of those outside. */
struct Cut {
    int at;
    int64_t rows; /* of that loop in a part; in the last stretch there may be less */
    int64_t stretches, positions;
};

/* At the outermost loop within which there are no more than `most`. */
Cut cut_loops(const int64_t *counts, int ndim, int64_t most);
/* Parts are in the order of the stretches, and each stretch in that of the positions. */
static inline int64_t cut_begin(const Cut &cut, int64_t part)
{
    return part / cut.positions * cut.rows;
}
static inline int64_t cut_rows(const Cut &cut, const int64_t *counts, int64_t part)
{
    const int64_t left = counts[cut.at] - cut_begin(cut, part);
    return left < cut.rows ? left : cut.rows;
}
/* How far a part is from the first one, for an operand with these strides; and the first part for
 * which that is the same, because a stride of zero repeats it. */
int64_t cut_offset(const Cut &cut, const int64_t *counts, const int64_t *strides, int64_t part);
int64_t cut_first(const Cut &cut, const int64_t *counts, const int64_t *strides, int64_t part);
/* How many parts are the first ones for something. */
int64_t cut_pieces(const Cut &cut, const int64_t *counts, const int64_t *strides);
/* The length of a loop, of those from cut.at on, in a part. */
static inline int64_t cut_count(const Cut &cut, const int64_t *counts, int at, int64_t part)
{
    return at == cut.at ? cut_rows(cut, counts, part) : counts[at];
}

#ifdef __CUDACC__

enum { MOST_PIPED = GPUOPS_MAX_INPUTS + 1 };

/* A call in parts. The operands are the inputs and, behind them, the result. An operator puts what
 * else it knows of its parts behind this. */
struct Parts {
    Call *call;
    Call part; /* the call on one part, whose operands are packed arrays on the device */
    int64_t count;
    int64_t bytes[MOST_PIPED];   /* of an operand in a part, at most; 0: it stays on the host */
    char *converted[MOST_PIPED]; /* where it is in the dtype that is computed in, if not its own */
    int64_t pieces[MOST_PIPED];  /* how many different ones of an operand there are */

    /* The number of an operand's piece in a part: what the part before had is not sent up again. */
    int64_t (*piece_of)(const Parts *, int k, int64_t number);
    /* Where it is on the host: the boxes one behind another; false: there are no more than i. The
     * result is one box. */
    bool (*find_box)(const Parts *, int k, int64_t number, int i, Box *box);
    /* Queues the work on a part; the data of its views are set. */
    Status (*run)(Parts *, int64_t number);
    /* Makes the parts smaller, where there is no memory for these; false: it cannot. */
    bool (*shrink)(Parts *);
};

/* The result is the last operand. */
static inline const View *operand_of(const Call *call, int k)
{
    return k < call->input_count ? &call->inputs[k] : &call->out;
}

static inline View *part_operand(Parts *parts, int k)
{
    return k < parts->part.input_count ? &parts->part.inputs[k] : &parts->part.out;
}

/* Sets call and part, of which the operator sets the shapes. */
void parts_open(Parts *parts, Call *call);
/* Whether a call is between arrays on the host that do not overlap, unless that does no harm. */
bool has_separate_parts(const Call *call);
/* The operator on one part, whose operands are as they are on the host: those of another dtype than
 * the one that is computed in are converted first. */
Status run_part(Parts *parts);
/* Makes them smaller until there are more than are on the device at once, as these would take about
 * as much as the whole; false: they cannot be that small. */
bool parts_cut(Parts *parts);
/* Runs them all. */
Status run_parts(Parts *parts);
/* Between the parts of a call: if some time has passed since the caller was asked last, asks
 * whether to go on, and tells how much is done. STATUS_INTERRUPTED: it is not to. The time is kept
 * for one call, from 0 on. Before that, the workers of its copies both ways are dismissed. */
Status look_now_and_then(const Call *call, int64_t done_bytes, int64_t bytes, int64_t *looked,
                         Traffic *traffic = NULL);

#endif

#endif
