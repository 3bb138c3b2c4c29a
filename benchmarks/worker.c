/* A simulated engine that is far cheaper than any router in front of it.
 *
 * It speaks just enough of vLLM's HTTP/1.1 for routers to accept it: models, version, health, chat
 * and text completions, unary and streamed. How many tokens a stream has is the request's own
 * max_tokens. Every token is one event in one chunk; its text ends with CLOCK_MONOTONIC, which
 * the load client (same machine, same clock) subtracts to get one-way latency. So the events of a
 * stream differ in their text alone (and their ids), as those of a real engine do.
 *
 *   worker PORT RATE [stepped]
 *
 * RATE is tokens per second and stream, 0 for as fast as the socket takes them, one send() a token.
 * With `stepped`, all streams emit at the same instants, as an engine that batches does. */
#define _GNU_SOURCE
#include "wire.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define TICK_NS 500000             /* how often due tokens are looked for */
#define TURN_TOKENS 64             /* unpaced: tokens a stream may send before the next has its turn */
#define BACKLOG_NS (2 * SECOND_NS) /* a paced stream further behind than this skips ahead */
#define READ_BYTES 65536

struct connection {
    int fd;
    struct buffer in, out;
    bool blocked;      /* the socket takes no more; EPOLLOUT is awaited */
    size_t position;   /* in streams[], while streaming */
    bool streaming;
    bool with_ids;     /* the request asked for token ids */
    long sent, tokens;
    int64_t due;
};

static int epoll_fd, timer_fd;
static int64_t period_ns; /* 0: unpaced */
static bool stepped;
static struct connection **streams;
static size_t stream_count, stream_capacity;

/* --- what it says ------------------------------------------------------------------------- */

#define ID "chatcmpl-0123456789abcdef0123456789abcdef"
#define CHUNK "data: {\"id\":\"" ID "\",\"object\":\"chat.completion.chunk\",\"created\":1764450000,\"model\":\"m\""

static const char STREAM_HEAD[] = "HTTP/1.1 200 OK\r\n"
                                  "content-type: text/event-stream; charset=utf-8\r\n"
                                  "transfer-encoding: chunked\r\n\r\n";
static const char ANSWER[] =
    "{\"id\":\"" ID "\",\"object\":\"chat.completion\",\"created\":1764450000,\"model\":\"m\","
    "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"The quick brown fox "
    "jumps over the lazy dog and then some more words follow.\"},\"logprobs\":null,"
    "\"finish_reason\":\"stop\"}],"
    "\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":16,\"total_tokens\":116}}";
static const char MODELS[] = "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1764450000,"
                             "\"owned_by\":\"vllm\",\"root\":\"m\",\"max_model_len\":32768}]}";
static const char *WORDS[] = {" hello", " the", " quick", " brown", " fox", " jumps", " over\\n", " lazy"};

static void put_chunk(struct buffer *out, const char *bytes, int length) {
    char *room = buffer_room(out, length + 16);
    int used = sprintf(room, "%x\r\n", length);
    memcpy(room + used, bytes, length);
    memcpy(room + used + length, "\r\n", 2);
    out->end += used + length + 2;
}

static void put_role(struct connection *c) {
    static const char role[] = CHUNK ",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
                                     "\"logprobs\":null,\"finish_reason\":null}]}\n\n";
    put_chunk(&c->out, role, sizeof role - 1);
}

static void put_token(struct connection *c, int64_t now) {
    char event[1024], ids[64] = "";
    bool last = c->sent + 1 == c->tokens;
    if (c->with_ids) sprintf(ids, ",\"token_ids\":[%ld]", 1000 + c->sent % 30000);
    int length = sprintf(event,
                         CHUNK ",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%s ts=%lld\"},\"logprobs\":null,"
                               "\"finish_reason\":%s%s}]}\n\n",
                         WORDS[c->sent & 7], (long long)now, last ? "\"length\"" : "null", ids);
    put_chunk(&c->out, event, length);
    c->sent++;
}

static void put_answer(struct connection *c, const char *status, const char *body) {
    char *room = buffer_room(&c->out, strlen(body) + 256);
    c->out.end += sprintf(room, "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                          status, strlen(body), body);
}

/* --- the socket --------------------------------------------------------------------------- */

static void await(struct connection *c, bool blocked) {
    if (c->blocked == blocked) return;
    struct epoll_event event = {.events = EPOLLIN | (blocked ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
    c->blocked = blocked;
}

/* Sends what is buffered. False when the peer is gone; c->blocked when some is left. */
static bool flush(struct connection *c) {
    while (buffer_length(&c->out) > 0) {
        ssize_t sent = send(c->fd, buffer_head(&c->out), buffer_length(&c->out), MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) {
            await(c, true);
            return true;
        }
        if (sent < 0) return false;
        c->out.start += sent;
    }
    await(c, false);
    return true;
}

static void stop_streaming(struct connection *c) {
    if (!c->streaming) return;
    c->streaming = false;
    streams[c->position] = streams[--stream_count];
    streams[c->position]->position = c->position;
}

static void start_streaming(struct connection *c) {
    if (stream_count == stream_capacity) {
        stream_capacity = stream_capacity * 2 + 64;
        streams = realloc(streams, stream_capacity * sizeof *streams);
        if (streams == NULL) die("realloc");
    }
    c->position = stream_count;
    streams[stream_count++] = c;
    c->streaming = true;
    c->sent = 0;
    c->due = now_ns();
    if (stepped) c->due = (c->due / period_ns + 1) * period_ns;
}

static void hang_up(struct connection *c) {
    stop_streaming(c);
    close(c->fd);
    free(c->in.bytes);
    free(c->out.bytes);
    free(c);
}

/* --- streams ------------------------------------------------------------------------------ */

static void finish_when_spent(struct connection *c) {
    static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    if (c->sent < c->tokens) return;
    buffer_append(&c->out, end, sizeof end - 1);
    stop_streaming(c);
}

static bool emit_due(struct connection *c, int64_t now) {
    if (c->due < now - BACKLOG_NS) c->due = now;
    while (c->streaming && c->due <= now) {
        put_token(c, now);
        c->due += period_ns;
        finish_when_spent(c);
    }
    return flush(c);
}

static bool emit_unpaced(struct connection *c) {
    for (int turn = 0; turn < TURN_TOKENS && c->streaming && !c->blocked; turn++) {
        put_token(c, now_ns());
        finish_when_spent(c);
        if (!flush(c)) return false;
    }
    return true;
}

static bool serve(struct connection *c);

/* Gives every stream its turn. Backwards, since a stream that ends is replaced by the last one,
 * which had its turn already. True when an unpaced stream could send more at once. */
static bool emit_all(void) {
    int64_t now = now_ns();
    bool more = false;
    for (size_t i = stream_count; i-- > 0;) {
        if (i >= stream_count) continue;
        struct connection *c = streams[i];
        bool alive = true;
        if (period_ns == 0) alive = c->blocked || emit_unpaced(c);
        else if (c->due <= now) alive = emit_due(c, now);
        if (alive && !c->streaming) alive = serve(c);
        if (!alive) hang_up(c);
        else more |= period_ns == 0 && c->streaming && !c->blocked;
    }
    return more;
}

static void tick(bool on) {
    static bool ticking = false;
    if (ticking == on) return;
    struct itimerspec every = {{0, on ? TICK_NS : 0}, {0, on ? TICK_NS : 0}};
    timerfd_settime(timer_fd, 0, &every, NULL);
    ticking = on;
}

/* --- requests ----------------------------------------------------------------------------- */

/* Length of the first complete request, 0 when there is none yet. */
static size_t request_length(struct connection *c, size_t *head_length) {
    char *head = buffer_head(&c->in);
    size_t length = buffer_length(&c->in);
    const char *end = find(head, length, "\r\n\r\n");
    if (end == NULL) return 0;
    *head_length = end + 4 - head;
    const char *value = header_value(head, *head_length, "\r\ncontent-length:");
    size_t total = *head_length + (value == NULL ? 0 : strtoul(value, NULL, 10));
    if (header_value(head, *head_length, "\r\ntransfer-encoding:") != NULL) {
        const char *last = find(end, length - (end - head), "\r\n0\r\n\r\n");
        total = last == NULL ? length + 1 : (size_t)(last + 7 - head);
    }
    return total <= length ? total : 0;
}

static void answer_get(struct connection *c, const char *path) {
    if (strncmp(path, "/v1/models", 10) == 0) put_answer(c, "200 OK", MODELS);
    else if (strncmp(path, "/version", 8) == 0) put_answer(c, "200 OK", "{\"version\":\"0.32.0\"}");
    else if (strncmp(path, "/health", 7) == 0) put_answer(c, "200 OK", "");
    else put_answer(c, "404 Not Found", "{\"detail\":\"Not Found\"}");
}

static bool is_true(const char *body, size_t length, const char *name) {
    const char *at = find(body, length, name);
    if (at == NULL) return false;
    at += strlen(name);
    return strncmp(at + strspn(at, ": "), "true", 4) == 0;
}

static void answer_post(struct connection *c, const char *body, size_t length) {
    if (!is_true(body, length, "\"stream\"")) {
        put_answer(c, "200 OK", ANSWER);
        return;
    }
    const char *budget = find(body, length, "\"max_tokens\"");
    c->tokens = budget == NULL ? 16 : strtol(budget + 12 + strspn(budget + 12, ": "), NULL, 10);
    c->with_ids = is_true(body, length, "\"return_token_ids\"");
    buffer_append(&c->out, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    put_role(c);
    start_streaming(c);
}

/* Answers the complete requests that have arrived. False when the peer is gone or talks nonsense. */
static bool serve(struct connection *c) {
    size_t head_length, total;
    while (!c->streaming && (total = request_length(c, &head_length)) > 0) {
        *buffer_room(&c->in, 1) = 0; /* numbers are read up to a byte that is none */
        char *head = buffer_head(&c->in);
        if (strncmp(head, "GET ", 4) == 0) answer_get(c, head + 4);
        else if (strncmp(head, "POST ", 5) == 0) answer_post(c, head + head_length, total - head_length);
        else return false;
        c->in.start += total;
        if (!flush(c)) return false;
        if (c->streaming && period_ns > 0 && !emit_due(c, now_ns())) return false;
    }
    return true;
}

static bool receive(struct connection *c) {
    ssize_t got = recv(c->fd, buffer_room(&c->in, READ_BYTES), READ_BYTES, 0);
    if (got < 0) return errno == EAGAIN;
    c->in.end += got;
    return got > 0 && serve(c);
}

static void welcome(int listener) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        struct connection *c = calloc(1, sizeof *c);
        if (c == NULL) die("calloc");
        c->fd = fd;
        no_delay(fd);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    struct sockaddr_in address = loopback(port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (void *)&address, sizeof address) != 0 || listen(fd, 4096) != 0) die("listen");
    return fd;
}

static void handle(struct connection *c, uint32_t events) {
    bool alive = true;
    if (events & EPOLLOUT) alive = flush(c);
    if (alive && (events & ~EPOLLOUT)) alive = receive(c);
    if (!alive) hang_up(c);
}

int main(int argc, char **argv) {
    if (argc < 3) return fprintf(stderr, "usage: worker PORT RATE [stepped]\n"), 2;
    double rate = atof(argv[2]);
    period_ns = rate > 0 ? (int64_t)(SECOND_NS / rate) : 0;
    stepped = period_ns > 0 && argc > 3 && strcmp(argv[3], "stepped") == 0;
    signal(SIGPIPE, SIG_IGN);

    int listener = listen_on(atoi(argv[1]));
    epoll_fd = epoll_create1(0);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event accepting = {.events = EPOLLIN, .data.ptr = &listener};
    struct epoll_event timing = {.events = EPOLLIN, .data.ptr = &timer_fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &accepting);
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &timing);

    static struct epoll_event ready[1024];
    bool more = false;
    for (;;) {
        int count = epoll_wait(epoll_fd, ready, 1024, more ? 0 : -1);
        bool due = period_ns == 0;
        for (int i = 0; i < count; i++) {
            uint64_t expirations;
            if (ready[i].data.ptr == &listener) welcome(listener);
            else if (ready[i].data.ptr == &timer_fd) due = read(timer_fd, &expirations, 8) == 8;
            else handle(ready[i].data.ptr, ready[i].events);
        }
        if (due) more = emit_all();
        tick(period_ns > 0 && stream_count > 0);
    }
}
