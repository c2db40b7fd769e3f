/* Large arrays on the host: in parts, three at a time.
 *
 * While one part is computed, the next one's operands are on their way up, and the result of the
 * one before is on its way down. So a call takes as long as the longer direction of the bus does,
 * or the computation, and no more memory of the device than a few parts take, whatever the size of
 * the arrays. What is of another dtype than the one that is computed in is sent up as it is, and
 * converted there. What a part is, the operators say: each_parts.cu, correlate_parts.cu,
 * matmul_parts.cu.
 *
 * Three streams of our own do the work, which is ordered by when one is made to wait for what
 * another one has been given until then:
 *
 *     up        part i  after what read its buffers last, the kernels of part i - 2
 *     compute   part i  after its operands are there, and the result of part i - 2 is gone
 *     down      part i  after its kernels
 */
#include "pipeline.cuh"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

Cut cut_loops(const int64_t *counts, int ndim, int64_t most)
{
    int64_t inside = 1;
    int at = ndim - 1;
    while (at > 0 && inside * counts[at] <= most) inside *= counts[at--];
    const int64_t rows = most > inside ? most / inside : 1;
    Cut cut = {at, 0, (counts[at] + rows - 1) / rows, 1};
    cut.rows = (counts[at] + cut.stretches - 1) / cut.stretches;
    for (int i = 0; i < at; i++) cut.positions *= counts[i];
    return cut;
}

int64_t cut_offset(const Cut &cut, const int64_t *counts, const int64_t *strides, int64_t part)
{
    int64_t offset = cut_begin(cut, part) * strides[cut.at], position = part % cut.positions;
    for (int i = cut.at - 1; i >= 0; i--) {
        offset += position % counts[i] * strides[i];
        position /= counts[i];
    }
    return offset;
}

int64_t cut_first(const Cut &cut, const int64_t *counts, const int64_t *strides, int64_t part)
{
    int64_t first = 0, position = part % cut.positions, step = 1;
    for (int i = cut.at - 1; i >= 0; i--) {
        if (strides[i] != 0) first += position % counts[i] * step;
        position /= counts[i];
        step *= counts[i];
    }
    return first + (strides[cut.at] == 0 ? 0 : part / cut.positions * cut.positions);
}

int64_t cut_pieces(const Cut &cut, const int64_t *counts, const int64_t *strides)
{
    int64_t pieces = strides[cut.at] == 0 ? 1 : cut.stretches;
    for (int i = 0; i < cut.at; i++)
        if (strides[i] != 0) pieces *= counts[i];
    return pieces;
}

/* Of the largest operand. Each part costs some 0.1 ms beside its bytes, and has shorter copies,
 * which are slower: 128 MiB and as much back take 6.5 ms in parts of 8 MiB on an H200, and 3.5 in
 * parts of 16. Where the operand is large, so are its parts: 512 MiB and as much back take 27 ms in
 * parts of 8 MiB, and 12 in parts of 32. */
constexpr int64_t PART_BYTES = 16 << 20;
constexpr int64_t MOST_PART_BYTES = 32 << 20;
constexpr int64_t PARTS = 16; /* before they grow */
constexpr int BUFFERS = 2;    /* of each operand */

#ifdef GPUOPS_FAKE_CUDA
/* Tests set their own, so that small arrays have many parts. */
extern "C" int64_t fake_cuda_part_bytes(int64_t bytes);
#endif

int64_t part_bytes(int64_t bytes)
{
    int64_t part = bytes / PARTS;
    if (part < PART_BYTES) part = PART_BYTES;
    if (part > MOST_PART_BYTES) part = MOST_PART_BYTES;
#ifdef GPUOPS_FAKE_CUDA
    part = fake_cuda_part_bytes(part);
#endif
    return part;
}

bool is_worth_parts(int64_t bytes)
{
    return bytes > BUFFERS * part_bytes(bytes);
}

#ifdef __CUDACC__

constexpr int64_t ALIGNMENT = 512; /* of buffers */
/* No memory has more; and of some of these, and in a wider dtype, the bytes are still a number. An
 * array that repeats a few may have any length. */
constexpr int64_t MOST_BUFFER_BYTES = 1LL << 48;
/* How often the caller is asked whether to go on, for which Python's lock has to be waited for. */
constexpr int64_t LOOK_MICROSECONDS = 100000;

static struct {
    pthread_mutex_t lock;
    Lanes *idle[MAX_DEVICES];
} lanes = {PTHREAD_MUTEX_INITIALIZER, {}};

static void lanes_destroy(Lanes *given)
{
    if (given->up != NULL) stream_release(given->up);
    if (given->compute != NULL) stream_release(given->compute);
    if (given->down != NULL) stream_release(given->down);
    free(given);
}

static Status lanes_create(int device, Lanes **created)
{
    Lanes *made = static_cast<Lanes *>(calloc(1, sizeof *made));
    if (made == NULL) return fail(STATUS_MEMORY_ERROR, "out of host memory for streams");
    Status status = STATUS_OK;
    in_spite_of_captures([&] {
        status = stream_create(device, true, 0, &made->up);
        if (status == STATUS_OK) status = stream_create(device, true, 0, &made->compute);
        if (status == STATUS_OK) status = stream_create(device, true, 0, &made->down);
    });
    if (status != STATUS_OK) {
        lanes_destroy(made);
        made = NULL;
    }
    *created = made;
    return status;
}

Status lanes_take(int device, Lanes **taken)
{
    pthread_mutex_lock(&lanes.lock);
    *taken = lanes.idle[device];
    if (*taken != NULL) lanes.idle[device] = (*taken)->next;
    pthread_mutex_unlock(&lanes.lock);
    return *taken != NULL ? STATUS_OK : lanes_create(device, taken);
}

void lanes_give(int device, Lanes *given)
{
    pthread_mutex_lock(&lanes.lock);
    given->next = lanes.idle[device];
    lanes.idle[device] = given;
    pthread_mutex_unlock(&lanes.lock);
}

void pipeline_flush(int device)
{
    pthread_mutex_lock(&lanes.lock);
    Lanes *idle = lanes.idle[device];
    lanes.idle[device] = NULL;
    pthread_mutex_unlock(&lanes.lock);
    while (idle != NULL) {
        Lanes *next = idle->next;
        lanes_destroy(idle);
        idle = next;
    }
}

/* What of an operand is on the device. */
struct Buffers {
    int count;               /* as many as it takes, up to BUFFERS */
    int64_t bytes;           /* of each */
    int64_t converted_bytes; /* of one more, for a part in the dtype that is computed in; or 0 */
    char *data;
    int current; /* the one that was filled last, and with what: */
    int64_t piece;
};

struct Pipeline {
    Parts *parts;
    int inputs; /* also the number of the result */
    Buffers operands[MOST_PIPED];
    Memory *memory;
    Lanes *lanes;
    Traffic *traffic;
    bool is_written; /* some of the result, or it may be */
    bool has_room;   /* for more on the device, until it turns out that there is none */
    int64_t looked;  /* when the caller was asked last; 0: not yet */
};

static bool casts_input(const Call *call, int k)
{
    return k < call->input_count && call->cast_inputs >> k & 1 &&
           call->inputs[k].dtype != call->compute;
}

void parts_open(Parts *parts, Call *call)
{
    *parts = {};
    parts->call = call;
    Call *part = &parts->part;
    part->op = call->op;
    part->input_count = call->input_count;
    part->compute = call->compute;
    part->precision = call->precision;
    part->elementwise = call->elementwise;
    part->device = call->device;
    part->slot = -1;
    for (int k = 0; k <= call->input_count; k++) {
        view_copy(part_operand(parts, k), operand_of(call, k));
    }
}

static Status allocate_buffers(Pipeline *pipeline)
{
    Parts *parts = pipeline->parts;
    int64_t bytes = 0;
    for (int k = 0; k <= pipeline->inputs; k++) {
        Buffers *buffers = &pipeline->operands[k];
        const View *view = operand_of(parts->call, k);
        if (parts->bytes[k] > MOST_BUFFER_BYTES)
            return fail(STATUS_MEMORY_ERROR,
                        "out of memory on cuda:%d: %lld bytes were asked for a part of an operand",
                        parts->call->device, (long long)parts->bytes[k]);
        buffers->count = static_cast<int>(parts->pieces[k] < BUFFERS ? parts->pieces[k] : BUFFERS);
        buffers->bytes = round_up(parts->bytes[k], ALIGNMENT);
        if (casts_input(parts->call, k))
            buffers->converted_bytes = round_up(
                parts->bytes[k] / view->item_bytes * dtype_bytes(parts->call->compute), ALIGNMENT);
        buffers->piece = -1;
        bytes += buffers->count * buffers->bytes + buffers->converted_bytes;
    }
    Status status = memory_allocate(parts->call->stream, bytes, &pipeline->memory);
    if (status != STATUS_OK) return status;
    char *data = memory_data(pipeline->memory);
    for (int k = 0; k <= pipeline->inputs; k++) {
        const Buffers &buffers = pipeline->operands[k];
        pipeline->operands[k].data = data;
        data += buffers.count * buffers.bytes;
        parts->converted[k] = buffers.converted_bytes > 0 ? data : NULL;
        data += buffers.converted_bytes;
    }
    return STATUS_OK;
}

/* The result, where it has no gaps. */
static void expect_result(Pipeline *pipeline)
{
    const View *out = &pipeline->parts->call->out;
    uintptr_t begin, end;
    view_extent(out, &begin, &end);
    const int64_t bytes = view_items(out) * out->item_bytes;
    if (end - begin == static_cast<uintptr_t>(bytes))
        traffic_expect(pipeline->traffic, reinterpret_cast<void *>(begin), bytes);
}

/* All that takes memory, before anything is written. */
static Status open_pipeline(Pipeline *pipeline)
{
    Parts *parts = pipeline->parts;
    Status status = lanes_take(parts->call->device, &pipeline->lanes);
    if (status != STATUS_OK) return status;
    status = traffic_open(&pipeline->traffic);
    if (status != STATUS_OK) return status;
    expect_result(pipeline);
    status = allocate_buffers(pipeline);
    parts->part.stream = pipeline->lanes->compute;
    for (int k = 0; k <= pipeline->inputs; k++) {
        View *view = part_operand(parts, k);
        if (parts->bytes[k] == 0) continue;
        view->device = parts->call->device;
        view->stream = pipeline->lanes->compute;
    }
    return status;
}

static char *buffer_of(const Buffers &buffers)
{
    return buffers.data + buffers.current * buffers.bytes;
}

static Status send_up_boxes(Pipeline *pipeline, int k, int64_t number)
{
    const Parts *parts = pipeline->parts;
    char *target = buffer_of(pipeline->operands[k]);
    Status status = STATUS_OK;
    Box box;
    for (int i = 0; status == STATUS_OK && parts->find_box(parts, k, number, i, &box); i++) {
        status = box_bring(box, 0, box_items(box), target, pipeline->lanes->up, pipeline->traffic,
                           &pipeline->has_room);
        target += box_items(box) * box.item_bytes;
    }
    return status;
}

static Status send_up(Pipeline *pipeline, int64_t number)
{
    const Parts *parts = pipeline->parts;
    Status status = STATUS_OK;
    for (int k = 0; k < pipeline->inputs && status == STATUS_OK; k++) {
        Buffers *buffers = &pipeline->operands[k];
        if (parts->bytes[k] == 0) continue;
        const int64_t piece = parts->piece_of(parts, k, number);
        if (piece == buffers->piece) continue;
        buffers->current = (buffers->current + 1) % buffers->count;
        buffers->piece = piece;
        status = send_up_boxes(pipeline, k, number);
    }
    return status;
}

/* Some of the results are where the caller sees them. */
static bool is_seen(const Pipeline *pipeline)
{
    return pipeline->is_written && !pipeline->parts->call->out_is_fresh;
}

/* Results that have been written already are what only an error of the device may leave. */
static Status as_late_failure(const Pipeline *pipeline, Status status)
{
    if (status != STATUS_MEMORY_ERROR || !is_seen(pipeline)) return status;
    const Failure failure = *last_failure();
    char text[sizeof failure.text];
    snprintf(text, sizeof text, "%s (%d) with some of the results written: %.512s",
             failure.cuda_name, failure.cuda_code, failure.text);
    return fail_cuda(STATUS_DEVICE_ERROR, failure.cuda_code, failure.cuda_name, text);
}

static Status compute(Pipeline *pipeline, int64_t number)
{
    Parts *parts = pipeline->parts;
    const int last = pipeline->inputs;
    pipeline->operands[last].current = static_cast<int>(number % pipeline->operands[last].count);
    for (int k = 0; k <= last; k++) {
        View *view = part_operand(parts, k);
        if (parts->bytes[k] > 0) view->data = buffer_of(pipeline->operands[k]);
    }
    return as_late_failure(pipeline, parts->run(parts, number));
}

static Status begin_down(Pipeline *pipeline, int64_t number)
{
    const Parts *parts = pipeline->parts;
    const int last = pipeline->inputs;
    Box box;
    (void)parts->find_box(parts, last, number, 0, &box);
    pipeline->is_written = true;
    return traffic_begin_down(pipeline->traffic, box, buffer_of(pipeline->operands[last]),
                              pipeline->lanes->down->handle);
}

/* Whoever is asked may do anything in between, also make another device current. */
Status ask_watch(Watch *watch, int device, int64_t done_bytes, int64_t bytes)
{
    const bool goes_on = watch->look(watch, done_bytes, bytes);
    int before;
    const Status status = device_enter(device, &before);
    if (goes_on) return status;
    return fail(STATUS_INTERRUPTED, "the call was ended before it was done");
}

Status look_now_and_then(const Call *call, int64_t done_bytes, int64_t bytes, int64_t *looked,
                         Traffic *traffic)
{
    Watch *watch = call->watch;
    if (watch == NULL || runtime_is_leaving()) return STATUS_OK;
    if (*looked == 0) *looked = microseconds();
    const bool is_end = done_bytes == 0 || done_bytes == bytes;
    const bool is_time = microseconds() - *looked >= LOOK_MICROSECONDS;
    if (!(is_end ? watch->sees_ends : is_time)) return STATUS_OK;
    if (traffic != NULL) traffic_pause(traffic);
    const Status status = ask_watch(watch, call->device, done_bytes, bytes);
    *looked = microseconds();
    return status;
}

/* Tells the caller how much is done. */
static Status look_after(Pipeline *pipeline, int64_t done)
{
    const Parts *parts = pipeline->parts;
    int64_t bytes = 0;
    for (int k = 0; k <= pipeline->inputs; k++)
        bytes += view_items(operand_of(parts->call, k)) * operand_of(parts->call, k)->item_bytes;
    const int64_t done_bytes =
        bytes / parts->count * done + bytes % parts->count * done / parts->count;
    return look_now_and_then(parts->call, done_bytes, bytes, &pipeline->looked, pipeline->traffic);
}

/* As an array of the given one's layout. */
static Status convert_operand(const Parts *parts, const View *given, char *data, View *view)
{
    const Call *part = &parts->part;
    view->dtype = part->compute;
    view->dtype_name = dtype_name(part->compute);
    view->item_bytes = dtype_bytes(part->compute);
    view->data = data;
    for (int i = 0; i < view->ndim; i++)
        view->strides[i] = given->strides[i] / given->item_bytes * view->item_bytes;
    /* In whatever order it lies, there are no gaps. */
    View from, to;
    view_copy(&from, given);
    view_copy(&to, view);
    from.ndim = to.ndim = 1;
    from.shape[0] = to.shape[0] = view_items(given);
    view_pack(&from);
    view_pack(&to);
    return convert_on_device(&to, &from, part->stream);
}

Status run_part(Parts *parts)
{
    Call *part = &parts->part;
    View given[GPUOPS_MAX_INPUTS];
    Status status = STATUS_OK;
    for (int k = 0; k < part->input_count; k++) {
        view_copy(&given[k], &part->inputs[k]);
        if (parts->converted[k] != NULL && status == STATUS_OK)
            status = convert_operand(parts, &given[k], parts->converted[k], &part->inputs[k]);
    }
    if (status == STATUS_OK) status = part->op->run(part);
    for (int k = 0; k < part->input_count; k++) view_copy(&part->inputs[k], &given[k]);
    return status;
}

static Status run_all(Pipeline *pipeline)
{
    const Lanes *lanes = pipeline->lanes;
    const int64_t count = pipeline->parts->count;
    pipeline->looked = 0;
    Status status = stream_wait(lanes->up, pipeline->parts->call->stream);
    for (int64_t number = 0; number < count && status == STATUS_OK; number++) {
        status = look_after(pipeline, number);
        if (status == STATUS_OK) status = send_up(pipeline, number);
        /* The next part goes up where the one before this one was. */
        if (status == STATUS_OK) status = stream_wait(lanes->up, lanes->compute);
        if (status == STATUS_OK) status = stream_wait(lanes->compute, lanes->up);
        if (status == STATUS_OK) status = compute(pipeline, number);
        /* What is left of the last result would come after this part's kernels. */
        if (status == STATUS_OK) status = traffic_queue_down(pipeline->traffic);
        /* The next result takes the place of the one before this one. */
        if (status == STATUS_OK) status = stream_wait(lanes->compute, lanes->down);
        if (status == STATUS_OK) status = stream_wait(lanes->down, lanes->compute);
        if (status == STATUS_OK) status = begin_down(pipeline, number);
    }
    if (status == STATUS_OK) status = traffic_end_down(pipeline->traffic);
    return status == STATUS_OK ? look_after(pipeline, count) : status;
}

/* Nothing may still be at work on the caller's memory; and if it cannot be waited for, the buffers
 * are not used again before that is over. */
static Status drain_lanes(Pipeline *pipeline)
{
    Stream *const streams[] = {pipeline->lanes->up, pipeline->lanes->compute,
                               pipeline->lanes->down};
    Status status = STATUS_OK;
    for (Stream *stream : streams) {
        const Status drained = stream_drain(stream->handle);
        if (drained == STATUS_OK) continue;
        status = drained;
        if (pipeline->memory != NULL)
            status = even_so(status, [&] { return memory_note_use(pipeline->memory, stream); });
    }
    return status;
}

/* *is_over becomes false where work may still be going on. */
static Status close_pipeline(Pipeline *pipeline, Status status, bool *is_over)
{
    if (runtime_is_forked()) return status;
    if (pipeline->traffic != NULL) status = traffic_close(pipeline->traffic, status);
    if (pipeline->lanes != NULL) {
        status = even_so(status, [&] {
            const Status drained = drain_lanes(pipeline);
            *is_over = *is_over && drained == STATUS_OK;
            return drained;
        });
        lanes_give(pipeline->parts->call->device, pipeline->lanes);
    }
    if (pipeline->memory != NULL) memory_release(pipeline->memory);
    return status;
}

bool has_separate_parts(const Call *call)
{
    const View *out = &call->out;
    if (call->elementwise && out->dtype != call->compute) return false;
    for (int k = 0; k < call->input_count; k++) {
        const View *input = &call->inputs[k];
        if (input->device != DEVICE_CPU) return false;
        if (views_overlap(out, input) && !(call->elementwise && views_coincide(out, input)))
            return false;
    }
    return true;
}

/* Where memory does not suffice, *again tells whether it may for smaller parts. */
static Status try_parts(Parts *parts, bool *again, bool *is_over)
{
    Pipeline pipeline = {};
    pipeline.parts = parts;
    pipeline.inputs = parts->call->input_count;
    pipeline.has_room = true;
    Status status = open_pipeline(&pipeline);
    if (status == STATUS_OK) status = run_all(&pipeline);
    *again = status == STATUS_MEMORY_ERROR && !is_seen(&pipeline);
    return close_pipeline(&pipeline, status, is_over);
}

bool parts_cut(Parts *parts)
{
    while (parts->count <= BUFFERS)
        if (!parts->shrink(parts)) return false;
    return true;
}

Status run_parts(Parts *parts)
{
    Call *call = parts->call;
    PinnedUse uses[MOST_PIPED] = {};
    for (int k = 0; k <= call->input_count; k++) pinned_hold(operand_of(call, k), &uses[k]);
    Status status;
    bool again, is_over = true;
    do status = try_parts(parts, &again, &is_over);
    while (again && parts->shrink != NULL && parts->shrink(parts));
    if (runtime_is_forked()) return status;
    for (int k = 0; k <= call->input_count; k++) pinned_let_go(&uses[k], call->device, is_over);
    /* All that was queued on the stream before is done as well. */
    if (status == STATUS_OK) status = slot_check(call->stream, call->stream->slot, true);
    memory_settle();
    return status;
}

#endif
