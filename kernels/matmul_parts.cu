/* matmul between large arrays on the host: in parts.
 *
 * A part is a panel of a result, some rows and some columns of it, for which some rows of a and
 * some columns of b go up; or, where matrices are small, the products of some whole ones of a
 * batch. The longer side of the results is cut finely and the panels along it come one after the
 * other, so that what they have in common, of the operand on the other side, is sent up once for
 * all of them. That is all of it, unless it is very large. Sums are never cut, and so a panel needs
 * memory for as many whole rows of a and columns of b. */
#include "matmul.cuh"
#include "pipeline.cuh"

#include <stdlib.h>

#ifdef __CUDACC__

/* Rows, or columns, with which a product is still about as fast as a larger one. */
constexpr int64_t LEAST_PANEL = 1024;
/* On the other side: for so many the operand that goes up again and again takes no longer than the
 * computation, for every dtype. */
constexpr int64_t MOST_PANEL = 16 << 10;
/* What tiles of kernels are multiples of, or whose multiples they are. */
constexpr int64_t PANEL_GRAIN = 128;

/* One side of the results, in panels. */
struct Panels {
    int64_t extent, most; /* of a panel */
    int64_t size, count;
};

struct ProductParts : Parts {
    int ndim;                                         /* of the batch, at least one */
    int64_t counts[GPUOPS_MAX_DIMS + 1];              /* and here the strides: */
    int64_t strides[MOST_PIPED][GPUOPS_MAX_DIMS + 1]; /* of a, b and the result */
    int64_t row_strides[MOST_PIPED], column_strides[MOST_PIPED];
    int64_t depth;
    int64_t most_matrices; /* of a part */
    Cut cut;
    Panels rows, columns;
};

static const ProductParts &product_of(const Parts *parts)
{
    return *static_cast<const ProductParts *>(parts);
}

/* Which part of the batch, and which panel of its results. */
struct Place {
    int64_t matrices, row, column;
};

static bool rows_are_longer(const ProductParts &parts)
{
    return parts.rows.extent >= parts.columns.extent;
}

static Place place_of(const ProductParts &parts, int64_t number)
{
    const bool by_rows = rows_are_longer(parts);
    const int64_t inner = (by_rows ? parts.rows : parts.columns).count;
    const int64_t outer = (by_rows ? parts.columns : parts.rows).count;
    const int64_t at_inner = number % inner, at_outer = number / inner % outer;
    return {number / inner / outer, by_rows ? at_inner : at_outer, by_rows ? at_outer : at_inner};
}

static int64_t panel_size(const Panels &panels, int64_t panel)
{
    const int64_t left = panels.extent - panel * panels.size;
    return left < panels.size ? left : panels.size;
}

static int64_t piece_of(const Parts *given, int k, int64_t number)
{
    const ProductParts &parts = product_of(given);
    const Place place = place_of(parts, number);
    const int64_t first = cut_first(parts.cut, parts.counts, parts.strides[k], place.matrices);
    return k == 0 ? first * parts.rows.count + place.row
                  : first * parts.columns.count + place.column;
}

/* The rows and columns of an operand in a part. */
static void find_extents(const ProductParts &parts, int k, const Place &place, int64_t *rows,
                         int64_t *columns)
{
    *rows = k == 1 ? parts.depth : panel_size(parts.rows, place.row);
    *columns = k == 0 ? parts.depth : panel_size(parts.columns, place.column);
}

/* On the device it lies as it does on the host, if not the other way round: without a transposition
 * on the way up. */
static bool is_transposed(const ProductParts &parts, int k)
{
    return k < 2 && llabs(parts.row_strides[k]) < llabs(parts.column_strides[k]);
}

static bool find_box(const Parts *given, int k, int64_t number, int i, Box *box)
{
    const ProductParts &parts = product_of(given);
    const View *view = operand_of(parts.call, k);
    if (i > 0) return false;
    const Place place = place_of(parts, number);
    int64_t rows, columns;
    find_extents(parts, k, place, &rows, &columns);
    char *base = static_cast<char *>(view->data) +
                 cut_offset(parts.cut, parts.counts, parts.strides[k], place.matrices);
    if (k != 1) base += place.row * parts.rows.size * parts.row_strides[k];
    if (k != 0) base += place.column * parts.columns.size * parts.column_strides[k];
    *box = {base, view->item_bytes, 0, {}, {}};
    for (int at = parts.cut.at; at < parts.ndim; at++) {
        const int64_t count = cut_count(parts.cut, parts.counts, at, place.matrices);
        if (parts.strides[k][at] != 0) box_append(box, count, parts.strides[k][at]);
    }
    const bool transposed = is_transposed(parts, k);
    if (transposed) box_append(box, columns, parts.column_strides[k]);
    box_append(box, rows, parts.row_strides[k]);
    if (!transposed) box_append(box, columns, parts.column_strides[k]);
    return true;
}

static void set_shape(ProductParts *parts, int k, const Place &place)
{
    View *view = part_operand(parts, k);
    view->ndim = 0;
    for (int at = parts->cut.at; at < parts->ndim; at++) {
        const int64_t count = cut_count(parts->cut, parts->counts, at, place.matrices);
        view->shape[view->ndim++] = parts->strides[k][at] == 0 ? 1 : count;
    }
    const int row = view->ndim++, column = view->ndim++;
    find_extents(*parts, k, place, &view->shape[row], &view->shape[column]);
    view_pack(view);
    if (!is_transposed(*parts, k)) return;
    view->strides[row] = view->item_bytes;
    view->strides[column] = view->shape[row] * view->item_bytes;
}

static Status run(Parts *given, int64_t number)
{
    ProductParts *parts = static_cast<ProductParts *>(given);
    const Place place = place_of(*parts, number);
    for (int k = 0; k <= 2; k++) set_shape(parts, k, place);
    return run_part(parts);
}

static void cut_side(Panels *panels)
{
    panels->count = (panels->extent + panels->most - 1) / panels->most;
    panels->size = (panels->extent + panels->count - 1) / panels->count;
    if (panels->count > 1 && panels->most % PANEL_GRAIN == 0)
        panels->size = round_up(panels->size, PANEL_GRAIN);
    panels->count = (panels->extent + panels->size - 1) / panels->size;
}

static void plan_parts(ProductParts *parts)
{
    parts->cut = cut_loops(parts->counts, parts->ndim, parts->most_matrices);
    cut_side(&parts->rows);
    cut_side(&parts->columns);
    parts->count =
        parts->cut.stretches * parts->cut.positions * parts->rows.count * parts->columns.count;
    for (int k = 0; k <= 2; k++) {
        const View *view = part_operand(parts, k);
        set_shape(parts, k, {0, 0, 0});
        parts->bytes[k] = view_items(view) * view->item_bytes;
        int64_t pieces = cut_pieces(parts->cut, parts->counts, parts->strides[k]);
        if (k != 1) pieces *= parts->rows.count;
        if (k != 0) pieces *= parts->columns.count;
        parts->pieces[k] = pieces;
    }
}

/* First on the short side, which makes the long one's operand go up more often; then both. */
static bool shrink(Parts *given)
{
    ProductParts *parts = static_cast<ProductParts *>(given);
    Panels *longer = rows_are_longer(*parts) ? &parts->rows : &parts->columns;
    Panels *shorter = rows_are_longer(*parts) ? &parts->columns : &parts->rows;
    if (parts->most_matrices > 1)
        parts->most_matrices /= 2;
    else if (shorter->most > longer->most || (longer->most == 1 && shorter->most > 1))
        shorter->most /= 2;
    else if (longer->most > 1)
        longer->most /= 2;
    else
        return false;
    plan_parts(parts);
    return true;
}

/* The loops over the batch, of which there is at least one, and the strides of the matrices. A
 * vector a is a row, and a vector b a column. */
static void describe(ProductParts *parts)
{
    const Call *call = parts->call;
    const View *a = &call->inputs[0], *b = &call->inputs[1], *out = &call->out;
    const bool has_rows = a->ndim > 1, has_columns = b->ndim > 1;
    const int batch = out->ndim - has_rows - has_columns;
    const int own[] = {has_rows ? a->ndim - 2 : 0, has_columns ? b->ndim - 2 : 0, batch};
    parts->ndim = batch > 0 ? batch : 1;
    for (int i = 0; i < parts->ndim; i++) parts->counts[i] = batch > 0 ? out->shape[i] : 1;
    for (int k = 0; k <= 2; k++) {
        const View *view = operand_of(call, k);
        for (int i = 0; i < parts->ndim; i++) {
            const int axis = i - (batch - own[k]);
            const bool repeats = batch == 0 || axis < 0 || view->shape[axis] == 1;
            parts->strides[k][i] = repeats ? 0 : view->strides[axis];
        }
        const int row = own[k], column = view->ndim - 1;
        parts->row_strides[k] = k == 1 || has_rows ? view->strides[row] : 0;
        parts->column_strides[k] = k == 0 || has_columns ? view->strides[column] : 0;
    }
    parts->depth = a->shape[a->ndim - 1];
    parts->rows.extent = has_rows ? a->shape[a->ndim - 2] : 1;
    parts->columns.extent = has_columns ? b->shape[b->ndim - 1] : 1;
}

static void choose_panels(ProductParts *parts)
{
    const int64_t rows = parts->rows.extent, columns = parts->columns.extent;
    const int64_t of_a = rows * parts->depth, of_b = parts->depth * columns;
    int64_t largest = of_a > of_b ? of_a : of_b;
    if (rows * columns > largest) largest = rows * columns;
    const int64_t item_bytes = parts->call->out.item_bytes;
    const int64_t items = part_bytes(largest * item_bytes) / item_bytes;
    parts->most_matrices = items / largest;
    parts->rows.most = rows;
    parts->columns.most = columns;
    if (parts->most_matrices > 0) return;
    parts->most_matrices = 1;
    Panels *longer = rows_are_longer(*parts) ? &parts->rows : &parts->columns;
    Panels *shorter = rows_are_longer(*parts) ? &parts->columns : &parts->rows;
    shorter->most = smaller(shorter->extent, MOST_PANEL);
    /* What a row takes, or a column, of the operand and of the result. */
    const int64_t across = parts->depth > shorter->most ? parts->depth : shorter->most;
    longer->most = items / across;
    if (longer->most < LEAST_PANEL) longer->most = LEAST_PANEL;
    longer->most = smaller(longer->most / PANEL_GRAIN * PANEL_GRAIN, longer->extent);
}

static bool is_empty(const Call *call)
{
    return view_items(&call->out) == 0 || call->inputs[0].shape[call->inputs[0].ndim - 1] == 0;
}

static bool is_large(const Call *call)
{
    for (int k = 0; k <= 2; k++)
        if (is_worth_parts(view_items(operand_of(call, k)) * call->out.item_bytes)) return true;
    return false;
}

Status run_matmul_in_parts(Call *call, bool any, bool *done)
{
    *done = false;
    if (is_empty(call) || !(any || is_large(call)) || !has_separate_parts(call)) return STATUS_OK;
    ProductParts parts;
    parts_open(&parts, call);
    parts.piece_of = piece_of;
    parts.find_box = find_box;
    parts.run = run;
    parts.shrink = shrink;
    describe(&parts);
    choose_panels(&parts);
    plan_parts(&parts);
    *done = any ? parts_cut(&parts) : parts.count > 1;
    return *done ? run_parts(&parts) : STATUS_OK;
}

#endif
