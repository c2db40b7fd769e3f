/* Element by element between large arrays on the host: in parts.
 *
 * The loops over all operands (each_loops) are cut at one of them, the outermost within which there
 * is no more than a part. What of an operand is the same for one part after the other, because it
 * is broadcast, is sent up once; so the loops outside go round for each stretch. */
#include "each.cuh"
#include "pipeline.cuh"

#ifdef __CUDACC__

struct EachParts : Parts {
    EachLoops loops;
    int64_t most, least; /* elements of the result in a part */
    Cut cut;
};

/* Parts that are smaller than this, against those that there is room for as a rule, would take
 * longer than it takes to hear that there is no memory. */
constexpr int64_t LEAST_SHARE = 16;

static int64_t piece_of(const Parts *parts, int k, int64_t number)
{
    const EachParts &each = *static_cast<const EachParts *>(parts);
    return cut_first(each.cut, each.loops.counts, each.loops.strides[k], number);
}

static bool find_box(const Parts *parts, int k, int64_t number, int i, Box *box)
{
    const EachParts &each = *static_cast<const EachParts *>(parts);
    const EachLoops &loops = each.loops;
    const int64_t *strides = loops.strides[k];
    if (i > 0) return false;
    char *base = loops.data[k] + cut_offset(each.cut, loops.counts, strides, number);
    *box = {base, operand_of(parts->call, k)->item_bytes, 0, {}, {}};
    for (int at = each.cut.at; at < loops.ndim; at++) {
        const int64_t count = cut_count(each.cut, loops.counts, at, number);
        box_append(box, strides[at] == 0 ? 1 : count, strides[at]);
    }
    return true;
}

static void set_shape(EachParts *each, int k, int64_t number)
{
    const EachLoops &loops = each->loops;
    View *view = part_operand(each, k);
    view->ndim = 0;
    for (int at = each->cut.at; at < loops.ndim; at++) {
        const int64_t count = cut_count(each->cut, loops.counts, at, number);
        view->shape[view->ndim++] = loops.strides[k][at] == 0 ? 1 : count;
    }
    view_pack(view);
}

static Status run(Parts *parts, int64_t number)
{
    EachParts *each = static_cast<EachParts *>(parts);
    for (int k = 0; k <= parts->call->input_count; k++)
        if (parts->bytes[k] > 0) set_shape(each, k, number);
    return run_part(parts);
}

static void plan_parts(EachParts *each)
{
    const Call *call = each->call;
    each->cut = cut_loops(each->loops.counts, each->loops.ndim, each->most);
    each->count = each->cut.stretches * each->cut.positions;
    for (int k = 0; k <= call->input_count; k++) {
        View *view = part_operand(each, k);
        const View *given = operand_of(call, k);
        if (k < call->input_count && view_items(given) == 1 && given->dtype == call->compute) {
            view->ndim = 0; /* it stays on the host */
            continue;
        }
        set_shape(each, k, 0);
        each->bytes[k] = view_items(view) * view->item_bytes;
        each->pieces[k] = cut_pieces(each->cut, each->loops.counts, each->loops.strides[k]);
    }
}

static bool shrink(Parts *given)
{
    EachParts *each = static_cast<EachParts *>(given);
    if (each->most / 2 < each->least) return false;
    each->most /= 2;
    plan_parts(each);
    return true;
}

Status run_each_in_parts(Call *call, bool any, bool *done)
{
    const int64_t item_bytes = call->out.item_bytes, bytes = view_items(&call->out) * item_bytes;
    *done = (any || is_worth_parts(bytes)) && has_separate_parts(call);
    if (!*done) return STATUS_OK;
    EachParts each;
    parts_open(&each, call);
    each.piece_of = piece_of;
    each.find_box = find_box;
    each.run = run;
    each.shrink = shrink;
    each_loops(call, &each.loops);
    each.most = part_bytes(bytes) / item_bytes;
    each.least = each.most / LEAST_SHARE > 1 ? each.most / LEAST_SHARE : 1;
    plan_parts(&each);
    *done = !any || parts_cut(&each);
    return *done ? run_parts(&each) : STATUS_OK;
}

#endif
