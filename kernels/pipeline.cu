/* Element by element between large arrays on the host: in parts, three at a time.
 *
 * While one part is computed, the next one's operands are on their way up, and the result of the
 * one before is on its way down. So a call takes as long as the longer direction of the bus does,
 * and no more memory of the device than a few parts take, whatever the size of the arrays.
 *
 * The loops over all operands (each_loops) are cut at one of them, the outermost within which there
 * is no more than a part: a part is a stretch of that loop, with all loops inside it, at one
 * position of those outside. What of an operand is the same for one part after the other, because
 * it is broadcast, is sent up once; so the loops outside go round for each stretch.
 *
 * Three streams of our own do the work, which is ordered by when one is made to wait for what
 * another one has been given until then:
 *
 *     up        part i  after what read its buffers last, the kernel of part i - 2
 *     compute   part i  after its operands are there, and the result of part i - 2 is gone
 *     down      part i  after its kernel
 */
#include "each.cuh"
#include "transfer.cuh"

#include <pthread.h>
#include <stdlib.h>

#ifdef __CUDACC__

constexpr int64_t PART_BYTES = 8 << 20; /* of the result, at most */
constexpr int BUFFERS = 2;              /* of each operand */
constexpr int64_t ALIGNMENT = 512;      /* of buffers */

/* Streams that one call has at a time. */
struct Lanes {
    Stream *up, *compute, *down;
    Lanes *next;
};

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

static Status lanes_take(int device, Lanes **taken)
{
    pthread_mutex_lock(&lanes.lock);
    *taken = lanes.idle[device];
    if (*taken != NULL) lanes.idle[device] = (*taken)->next;
    pthread_mutex_unlock(&lanes.lock);
    return *taken != NULL ? STATUS_OK : lanes_create(device, taken);
}

static void lanes_give(int device, Lanes *given)
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

/* What of an operand is on the device; the result is the last one. */
struct PipedOperand {
    bool stays;    /* on the host: one element */
    int buffers;   /* as many as it takes, up to BUFFERS */
    int64_t bytes; /* of a buffer */
    char *data;    /* the first of them */
    int current;   /* the one that was filled last, and where from: */
    const char *source;
};

struct Pipeline {
    Call *call;
    EachLoops loops;
    int cut;                      /* the loop that is cut */
    int64_t rows;                 /* of that loop in a part; in the last ones there may be less */
    int64_t stretches, positions; /* of the loops outside it: there is a part for each pair */
    PipedOperand operands[GPUOPS_MAX_INPUTS + 1];
    Call part; /* on the device */
    PinnedUse uses[GPUOPS_MAX_INPUTS + 1];
    Memory *memory;
    Lanes *lanes;
    Traffic *traffic;
};

/* The result is the last operand. */
static const View *operand_of(const Call *call, int k)
{
    return k < call->input_count ? &call->inputs[k] : &call->out;
}

static void plan_parts(Pipeline *pipeline)
{
    EachLoops *loops = &pipeline->loops;
    each_loops(pipeline->call, loops);
    const int64_t most = PART_BYTES / pipeline->call->out.item_bytes;
    int64_t inside = 1;
    int cut = loops->ndim - 1;
    while (cut > 0 && inside * loops->counts[cut] <= most) inside *= loops->counts[cut--];
    const int64_t count = loops->counts[cut];
    pipeline->cut = cut;
    pipeline->stretches = (count + most / inside - 1) / (most / inside);
    pipeline->rows = (count + pipeline->stretches - 1) / pipeline->stretches;
    pipeline->positions = 1;
    for (int i = 0; i < cut; i++) pipeline->positions *= loops->counts[i];
}

/* A view on the device for each operand, and the size of its buffers. */
static void plan_operand(Pipeline *pipeline, int k)
{
    const EachLoops &loops = pipeline->loops;
    const Call *call = pipeline->call;
    const bool is_result = k == call->input_count;
    const View *given = operand_of(call, k);
    View *view = is_result ? &pipeline->part.out : &pipeline->part.inputs[k];
    PipedOperand *operand = &pipeline->operands[k];
    view_copy(view, given);
    view->ndim = 0;
    operand->stays = !is_result && view_items(given) == 1;
    if (operand->stays) return;

    int64_t different = loops.strides[k][pipeline->cut] == 0 ? 1 : pipeline->stretches;
    for (int i = 0; i < pipeline->cut; i++)
        if (loops.strides[k][i] != 0) different = BUFFERS;
    operand->buffers = static_cast<int>(different < BUFFERS ? different : BUFFERS);
    view->device = call->device;
    view->stream = pipeline->lanes->compute;
    for (int i = pipeline->cut; i < loops.ndim; i++) {
        const int64_t count = i == pipeline->cut ? pipeline->rows : loops.counts[i];
        view->shape[view->ndim++] = loops.strides[k][i] == 0 ? 1 : count;
    }
    view_pack(view);
    operand->bytes = (view_items(view) * view->item_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static Status allocate_buffers(Pipeline *pipeline)
{
    const int count = pipeline->call->input_count + 1;
    int64_t bytes = 0;
    for (int k = 0; k < count; k++)
        bytes += pipeline->operands[k].buffers * pipeline->operands[k].bytes;
    Status status = memory_allocate(pipeline->call->stream, bytes, &pipeline->memory);
    if (status != STATUS_OK) return status;
    char *data = memory_data(pipeline->memory);
    for (int k = 0; k < count; k++) {
        pipeline->operands[k].data = data;
        data += pipeline->operands[k].buffers * pipeline->operands[k].bytes;
    }
    return STATUS_OK;
}

/* All that takes memory, before anything is written. */
static Status open_pipeline(Pipeline *pipeline)
{
    const Call *call = pipeline->call;
    Status status = lanes_take(call->device, &pipeline->lanes);
    if (status != STATUS_OK) return status;
    status = traffic_open(&pipeline->traffic);
    if (status != STATUS_OK) return status;
    plan_parts(pipeline);
    Call *part = &pipeline->part;
    part->op = call->op;
    part->input_count = call->input_count;
    part->compute = call->compute;
    part->elementwise = true;
    part->device = call->device;
    part->stream = pipeline->lanes->compute;
    part->slot = -1;
    for (int k = 0; k <= call->input_count; k++) plan_operand(pipeline, k);
    return allocate_buffers(pipeline);
}

/* Where an operand of a part lies on the host. */
static Box box_of_part(const Pipeline *pipeline, int k, int64_t number)
{
    const EachLoops &loops = pipeline->loops;
    const int64_t *strides = loops.strides[k];
    const int cut = pipeline->cut;
    const int64_t begin = number / pipeline->positions * pipeline->rows;
    int64_t position = number % pipeline->positions;
    Box box = {loops.data[k] + begin * strides[cut], pipeline->call->out.item_bytes, 0, {}, {}};
    for (int i = cut - 1; i >= 0; i--) {
        box.base += position % loops.counts[i] * strides[i];
        position /= loops.counts[i];
    }
    for (int i = cut; i < loops.ndim; i++) {
        int64_t count = loops.counts[i];
        if (i == cut) count = count - begin < pipeline->rows ? count - begin : pipeline->rows;
        box_append(&box, strides[i] == 0 ? 1 : count, strides[i]);
    }
    return box;
}

static char *buffer_of(const PipedOperand &operand)
{
    return operand.data + operand.current * operand.bytes;
}

static Status send_up(Pipeline *pipeline, int64_t number)
{
    Status status = STATUS_OK;
    for (int k = 0; k < pipeline->call->input_count && status == STATUS_OK; k++) {
        PipedOperand *operand = &pipeline->operands[k];
        if (operand->stays) continue;
        const Box box = box_of_part(pipeline, k, number);
        /* What begins there is the same, or only the first rows of it: no part is longer than the
         * one before. */
        if (operand->source == box.base) continue;
        operand->current = (operand->current + 1) % operand->buffers;
        operand->source = box.base;
        status =
            traffic_up(pipeline->traffic, box, buffer_of(*operand), pipeline->lanes->up->handle);
    }
    return status;
}

static Status compute(Pipeline *pipeline, int64_t number)
{
    const int last = pipeline->call->input_count;
    const int64_t begin = number / pipeline->positions * pipeline->rows;
    const int64_t left = pipeline->loops.counts[pipeline->cut] - begin;
    Call *part = &pipeline->part;
    pipeline->operands[last].current = static_cast<int>(number % BUFFERS);
    for (int k = 0; k <= last; k++) {
        const PipedOperand &operand = pipeline->operands[k];
        View *view = k < last ? &part->inputs[k] : &part->out;
        if (operand.stays) continue;
        view->data = buffer_of(operand);
        if (pipeline->loops.strides[k][pipeline->cut] != 0)
            view->shape[0] = left < pipeline->rows ? left : pipeline->rows;
    }
    return part->op->run(part);
}

static Status run_parts(Pipeline *pipeline)
{
    const Lanes *lanes = pipeline->lanes;
    const int last = pipeline->call->input_count;
    const int64_t parts = pipeline->stretches * pipeline->positions;
    Status status = stream_wait(lanes->up, pipeline->call->stream);
    for (int64_t number = 0; number < parts && status == STATUS_OK; number++) {
        status = send_up(pipeline, number);
        /* The next part goes up where the one before this one was. */
        if (status == STATUS_OK) status = stream_wait(lanes->up, lanes->compute);
        if (status == STATUS_OK) status = stream_wait(lanes->compute, lanes->up);
        if (status == STATUS_OK) status = compute(pipeline, number);
        /* The next result takes the place of the one before this one. */
        if (status == STATUS_OK) status = stream_wait(lanes->compute, lanes->down);
        if (status == STATUS_OK) status = stream_wait(lanes->down, lanes->compute);
        if (status == STATUS_OK)
            status = traffic_begin_down(pipeline->traffic, box_of_part(pipeline, last, number),
                                        buffer_of(pipeline->operands[last]), lanes->down->handle);
        if (status == STATUS_OK && number > 0) status = traffic_end_down(pipeline->traffic);
    }
    return status == STATUS_OK ? traffic_end_down(pipeline->traffic) : status;
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
        const Failure failure = *last_failure();
        if (pipeline->memory != NULL) (void)memory_note_use(pipeline->memory, stream);
        status = fail_cuda(drained, failure.cuda_code, failure.cuda_name, failure.text);
    }
    return status;
}

static Status close_pipeline(Pipeline *pipeline, Status status)
{
    if (pipeline->traffic != NULL) status = traffic_close(pipeline->traffic, status);
    const Failure first = status == STATUS_OK ? Failure() : *last_failure();
    if (pipeline->lanes != NULL) {
        const Status last = drain_lanes(pipeline);
        if (status == STATUS_OK)
            status = last;
        else
            status = fail_cuda(status, first.cuda_code, first.cuda_name, first.text);
        lanes_give(pipeline->call->device, pipeline->lanes);
    }
    if (pipeline->memory != NULL) memory_release(pipeline->memory);
    return status;
}

bool pipeline_takes(const Call *call)
{
    for (int k = 0; k < call->input_count; k++)
        if (call->inputs[k].device != DEVICE_CPU || call->inputs[k].dtype != call->compute)
            return false;
    return call->elementwise &&
           view_items(&call->out) > BUFFERS * PART_BYTES / call->out.item_bytes;
}

Status run_pipeline(Call *call)
{
    Pipeline pipeline = {};
    pipeline.call = call;
    for (int k = 0; k <= call->input_count; k++)
        pinned_hold(operand_of(call, k), &pipeline.uses[k]);
    Status status = open_pipeline(&pipeline);
    if (status == STATUS_OK) status = run_parts(&pipeline);
    status = close_pipeline(&pipeline, status);
    for (int k = 0; k <= call->input_count; k++)
        pinned_let_go(&pipeline.uses[k], call->device, status == STATUS_OK);
    /* All that was queued on the stream before is done as well. */
    if (status == STATUS_OK) status = slot_check(call->stream, call->stream->slot, true);
    memory_settle();
    return status;
}

#endif
