/* correlate between large images on the host: in parts.
 *
 * A part is some whole images, or some rows of one. For rows, what goes up are the rows of the
 * image that they need: those themselves and, above and below, as many as the weights reach. Rows
 * beyond the border are resolved here, by going up from where the border has them, so that the
 * kernels find all rows inside what they take for the image. Only those of a constant border stay
 * away, whose value may not be one of the image's dtype: the kernels meet the border there, where
 * the rows end. What is beyond the left and right is the kernels' work, as ever. */
#include "correlate.cuh"
#include "pipeline.cuh"

#ifdef __CUDACC__

/* Rows that go up once more with the next part are no more than so much of them. */
constexpr int64_t LEAST_ROWS_PER_HALO = 4;

struct FilterParts : Parts {
    Filter filter;
    const double *weights;
    int64_t most_rows; /* of a part */
    Cut cut;           /* of the loops over images and rows, the shape without its last axis */
    bool is_of_rows;   /* of one image, else of whole images */
};

static const FilterParts &filter_of(const Parts *parts)
{
    return *static_cast<const FilterParts *>(parts);
}

/* The rows of the image that a part needs, borders not resolved. */
struct Needed {
    int64_t begin, end;
};

static Needed needed_rows(const FilterParts &parts, int64_t number)
{
    const Filter &filter = parts.filter;
    const int64_t begin = cut_begin(parts.cut, number) - filter.top;
    const int64_t end =
        begin + cut_rows(parts.cut, parts.call->out.shape, number) + filter.rows - 1;
    if (filter.border != BORDER_CONSTANT) return {begin, end};
    return {begin < 0 ? 0 : begin, end > filter.height ? filter.height : end};
}

/* Rows one after another that are so in the image too, or in its reverse, or are all the same. */
struct RowRun {
    int64_t first, step, count;
};

static RowRun run_of_rows(const Filter &filter, Needed rows)
{
    const auto place = [&](int64_t row) { return position_of(row, filter.height, filter.border); };
    RowRun run = {place(rows.begin), 1, 1};
    const int64_t most = rows.end - rows.begin;
    if (rows.begin >= 0 && rows.begin < filter.height) {
        const int64_t left = filter.height - rows.begin;
        run.count = left < most ? left : most;
        return run;
    }
    if (most > 1) run.step = place(rows.begin + 1) - run.first;
    if (run.step < -1 || run.step > 1) return run;
    while (run.count < most && place(rows.begin + run.count) == run.first + run.count * run.step)
        run.count++;
    return run;
}

static bool find_rows(const FilterParts &parts, int64_t number, int i, Box *box)
{
    const View *input = &parts.call->inputs[0];
    const int last = input->ndim - 1;
    Needed rows = needed_rows(parts, number);
    RowRun run = run_of_rows(parts.filter, rows);
    for (; i > 0; i--) {
        rows.begin += run.count;
        if (rows.begin == rows.end) return false;
        run = run_of_rows(parts.filter, rows);
    }
    const int64_t row_stride = input->strides[last - 1];
    const int64_t offset = cut_offset(parts.cut, input->shape, input->strides, number) -
                           cut_begin(parts.cut, number) * row_stride + run.first * row_stride;
    *box = {static_cast<char *>(input->data) + offset, input->item_bytes, 0, {}, {}};
    box_append(box, run.count, run.step * row_stride);
    box_append(box, input->shape[last], input->strides[last]);
    return true;
}

static bool find_box(const Parts *given, int k, int64_t number, int i, Box *box)
{
    const FilterParts &parts = filter_of(given);
    const Call *call = parts.call;
    if (k == 0 && parts.is_of_rows) return find_rows(parts, number, i, box);
    if (i > 0) return false;
    const View *view = k == 0 ? &call->inputs[0] : &call->out;
    char *base =
        static_cast<char *>(view->data) + cut_offset(parts.cut, view->shape, view->strides, number);
    *box = {base, view->item_bytes, 0, {}, {}};
    box_append(box, cut_rows(parts.cut, view->shape, number), view->strides[parts.cut.at]);
    for (int at = parts.cut.at + 1; at < view->ndim; at++)
        box_append(box, view->shape[at], view->strides[at]);
    return true;
}

static int64_t piece_of(const Parts *, int, int64_t number)
{
    return number;
}

static void set_shape(const FilterParts &parts, int64_t rows, View *view)
{
    const View *out = &parts.call->out;
    view->ndim = 0;
    view->shape[view->ndim++] = rows;
    for (int at = parts.cut.at + 1; at < out->ndim; at++)
        view->shape[view->ndim++] = out->shape[at];
    view_pack(view);
}

static Status run(Parts *given, int64_t number)
{
    FilterParts *parts = static_cast<FilterParts *>(given);
    Filter filter = parts->filter;
    const int64_t rows = cut_rows(parts->cut, parts->call->out.shape, number);
    View *input = &parts->part.inputs[0], *out = &parts->part.out;
    set_shape(*parts, rows, out);
    set_shape(*parts, rows, input);
    filter.images = view_items(out) / (filter.height * filter.width);
    if (parts->is_of_rows) {
        const Needed needed = needed_rows(*parts, number);
        filter.images = 1;
        filter.height = rows;
        filter.in_height = needed.end - needed.begin;
        /* Of a constant border, rows may be left out above. */
        filter.top = needed.begin - (cut_begin(parts->cut, number) - filter.top);
        set_shape(*parts, filter.in_height, input);
    }
    return correlate_on_device(&parts->part, filter, parts->weights);
}

static void plan_parts(FilterParts *parts)
{
    const Call *call = parts->call;
    const Filter &filter = parts->filter;
    const View *input = &call->inputs[0], *out = &call->out;
    const int rows_axis = out->ndim - 2;
    parts->cut = cut_loops(out->shape, out->ndim - 1, parts->most_rows);
    const Cut &cut = parts->cut;
    parts->is_of_rows = cut.at == rows_axis && cut.stretches > 1;
    parts->count = cut.stretches * cut.positions;
    int64_t rows = cut.rows;
    for (int at = cut.at + 1; at <= rows_axis; at++) rows *= out->shape[at];
    const int64_t halo = parts->is_of_rows ? filter.rows - 1 : 0;
    parts->bytes[0] = (rows + halo) * filter.width * input->item_bytes;
    parts->bytes[call->input_count] = rows * filter.width * out->item_bytes;
    parts->pieces[0] = parts->pieces[call->input_count] = parts->count;
}

static bool shrink(Parts *given)
{
    FilterParts *parts = static_cast<FilterParts *>(given);
    if (parts->most_rows == 1) return false;
    parts->most_rows /= 2;
    plan_parts(parts);
    return true;
}

static int64_t wider_item(const Call *call)
{
    const int64_t in = call->inputs[0].item_bytes, out = call->out.item_bytes;
    return in > out ? in : out;
}

bool has_filter_parts(const Call *call, bool any)
{
    const View *out = &call->out;
    if (out->ndim < 2) return false;
    if (!any && !is_worth_parts(view_items(out) * wider_item(call))) return false;
    /* A single row is not cut. */
    return view_items(out) > out->shape[out->ndim - 1] && has_separate_parts(call);
}

Status correlate_in_parts(Call *call, const Filter &filter, const double *weights, bool any,
                          bool *done)
{
    FilterParts parts;
    parts_open(&parts, call);
    parts.filter = filter;
    parts.weights = weights;
    parts.piece_of = piece_of;
    parts.find_box = find_box;
    parts.run = run;
    parts.shrink = shrink;
    const int64_t item_bytes = wider_item(call);
    const int64_t rows =
        part_bytes(view_items(&call->out) * item_bytes) / (filter.width * item_bytes);
    const int64_t least = LEAST_ROWS_PER_HALO * (filter.rows - 1);
    parts.most_rows = rows > least ? rows : least;
    if (parts.most_rows < 1) parts.most_rows = 1;
    plan_parts(&parts);
    *done = !any || parts_cut(&parts);
    return *done ? run_parts(&parts) : STATUS_OK;
}

#endif
