/* A closed-loop load client: N keep-alive connections, each sends its next request when the answer
 * to the last one is complete.
 *
 *   load PORT CONNECTIONS unary|stream TOKENS PROMPT_BYTES RAMP WARM WINDOW [MODEL]
 *
 * The connections are opened evenly over RAMP seconds (so that paced streams are spread over their
 * period), WARM further seconds pass, then WINDOW seconds are measured. Prints `open` when the
 * window opens and `closed` when it closes, waits for a line on stdin (so that whoever samples the
 * router's CPU and memory does it before the connections go), then prints one JSON object.
 *
 * An answer counts as an error unless it is a whole 200; a stream also needs a finish reason and
 * [DONE]. Latency of an event is now minus the "ts=" its worker wrote into it. */
#define _GNU_SOURCE
#include "wire.h"

#include <signal.h>
#include <sys/epoll.h>
#include <unistd.h>

#define READ_BYTES 262144
#define BUCKETS 4000000 /* one a microsecond; what is longer counts as the last */

enum framing { HEAD, SIZED, CHUNK_SIZE, CHUNK_BYTES, CHUNK_END, LAST_CRLF, UNTIL_CLOSE };

struct connection {
    int fd;
    struct buffer in, events;
    enum framing framing;
    size_t left; /* bytes of the body or of the chunk still to come */
    int status;
    bool closes; /* the answer said connection: close */
    bool finished, done, token_seen;
    int64_t sent_at;
};

struct histogram {
    uint32_t counts[BUCKETS];
    long total;
};

static struct histogram latency, first_token;
static struct {
    long answers, errors; /* from the start */
    long requests, tokens, bytes; /* in the window */
} seen;

static int epoll_fd, port;
static bool streams, measuring;
static struct buffer request;

static void record(struct histogram *h, int64_t from, int64_t to) {
    if (!measuring) return;
    int64_t us = (to - from) / 1000;
    h->counts[us < 0 ? 0 : us >= BUCKETS ? BUCKETS - 1 : us]++;
    h->total++;
}

static long percentile(const struct histogram *h, double share) {
    long wanted = (long)(h->total * share), passed = 0;
    for (long us = 0; us < BUCKETS; us++) {
        passed += h->counts[us];
        if (passed > wanted) return us;
    }
    return 0;
}

/* --- requests ----------------------------------------------------------------------------- */

static void write_request(long tokens, int prompt_bytes, const char *model) {
    static const char filler[] = "lorem ipsum ";
    char *body = malloc(prompt_bytes + strlen(model) + 512);
    if (body == NULL) die("malloc");
    int length = sprintf(body, "{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"", model);
    for (int i = 0; i < prompt_bytes; i++) body[length++] = filler[i % (sizeof filler - 1)];
    length += sprintf(body + length, "\"}],\"max_tokens\":%ld,\"temperature\":0.7%s}", tokens,
                      streams ? ",\"stream\":true" : "");
    char *room = buffer_room(&request, length + 512);
    request.end += sprintf(room,
                           "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                           "User-Agent: load/1\r\nAccept: */*\r\nAuthorization: Bearer sk-abc\r\n"
                           "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n",
                           port, length);
    buffer_append(&request, body, length);
    free(body);
}

static void ask(struct connection *c) {
    c->framing = HEAD;
    c->finished = c->done = c->token_seen = false;
    c->in.start = c->in.end = c->events.start = c->events.end = 0;
    c->sent_at = now_ns();
    ssize_t length = buffer_length(&request);
    if (send(c->fd, buffer_head(&request), length, MSG_NOSIGNAL) != length) seen.errors++;
}

static void dial(struct connection *c) {
    struct sockaddr_in address = loopback(port);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c->fd, (void *)&address, sizeof address) != 0) die("connect");
    no_delay(c->fd);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event);
    ask(c);
}

static void answered(struct connection *c, bool whole, bool reusable) {
    bool good = whole && c->status == 200 && (!streams || (c->finished && c->done));
    seen.answers++;
    if (!good) seen.errors++;
    if (measuring) seen.requests++;
    if (!streams) record(&latency, c->sent_at, now_ns());
    if (reusable && !c->closes) {
        ask(c);
        return;
    }
    close(c->fd);
    dial(c);
}

/* --- answers ------------------------------------------------------------------------------ */

static void read_event(struct connection *c, const char *event, size_t length, int64_t now) {
    const char *at = find(event, length, "\"finish_reason\":");
    if (at != NULL && at[16 + strspn(at + 16, " ")] == '"') c->finished = true;
    if (find(event, length, "data: [DONE]") != NULL) c->done = true;
    at = find(event, length, " ts=");
    if (at == NULL) return;
    record(&latency, strtoll(at + 4, NULL, 10), now);
    if (!c->token_seen) record(&first_token, c->sent_at, now);
    c->token_seen = true;
    if (measuring) seen.tokens++;
}

static void read_body(struct connection *c, const char *bytes, size_t length) {
    if (measuring) seen.bytes += length;
    if (!streams) return;
    buffer_append(&c->events, bytes, length);
    int64_t now = now_ns();
    for (;;) {
        const char *event = buffer_head(&c->events);
        const char *end = find(event, buffer_length(&c->events), "\n\n");
        if (end == NULL) return;
        read_event(c, event, end - event, now);
        c->events.start += end + 2 - event;
    }
}

static bool read_head(struct connection *c) {
    char *head = buffer_head(&c->in);
    const char *end = find(head, buffer_length(&c->in), "\r\n\r\n");
    if (end == NULL) return false;
    size_t length = end + 4 - head;
    const char *connection = header_value(head, length, "\r\nconnection:");
    const char *size = header_value(head, length, "\r\ncontent-length:");
    c->status = atoi(head + 9);
    c->closes = connection != NULL && strncasecmp(connection, "close", 5) == 0;
    c->framing = UNTIL_CLOSE;
    if (header_value(head, length, "\r\ntransfer-encoding:") != NULL) c->framing = CHUNK_SIZE;
    else if (size != NULL) c->framing = SIZED, c->left = strtoul(size, NULL, 10);
    c->in.start += length;
    return true;
}

/* Takes up to c->left bytes of body. True when all of them have come. */
static bool take_left(struct connection *c) {
    size_t length = buffer_length(&c->in);
    if (length > c->left) length = c->left;
    read_body(c, buffer_head(&c->in), length);
    c->in.start += length;
    c->left -= length;
    return c->left == 0;
}

static bool take_crlf(struct connection *c) {
    if (buffer_length(&c->in) < 2) return false;
    c->in.start += 2;
    return true;
}

static bool read_chunk_size(struct connection *c) {
    const char *line = buffer_head(&c->in);
    const char *end = find(line, buffer_length(&c->in), "\r\n");
    if (end == NULL) return false;
    c->left = strtoul(line, NULL, 16);
    c->framing = c->left > 0 ? CHUNK_BYTES : LAST_CRLF;
    c->in.start += end + 2 - line;
    return true;
}

/* Reads on as far as the bytes go. True when an answer is complete. */
static bool read_answer(struct connection *c) {
    for (;;) {
        switch (c->framing) {
        case HEAD:
            if (!read_head(c)) return false;
            break;
        case SIZED:
            return take_left(c);
        case CHUNK_SIZE:
            if (!read_chunk_size(c)) return false;
            break;
        case CHUNK_BYTES:
            if (!take_left(c)) return false;
            c->framing = CHUNK_END;
            break;
        case CHUNK_END:
            if (!take_crlf(c)) return false;
            c->framing = CHUNK_SIZE;
            break;
        case LAST_CRLF:
            return take_crlf(c);
        case UNTIL_CLOSE:
            read_body(c, buffer_head(&c->in), buffer_length(&c->in));
            c->in.start = c->in.end;
            return false;
        }
    }
}

static void receive(struct connection *c) {
    ssize_t got = recv(c->fd, buffer_room(&c->in, READ_BYTES), READ_BYTES, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        answered(c, c->framing == UNTIL_CLOSE, false);
        return;
    }
    c->in.end += got;
    if (read_answer(c)) answered(c, true, true);
}

/* --- the run ------------------------------------------------------------------------------ */

/* Serves the connections until `until`; on the way opens those whose time has come. */
static void run(struct connection *all, int count, int64_t from, int64_t ramp, int64_t until) {
    static struct epoll_event ready[1024];
    static int opened = 0;
    for (int64_t now = now_ns(); now < until; now = now_ns()) {
        while (opened < count && from + ramp * opened / count <= now) dial(&all[opened++]);
        int events = epoll_wait(epoll_fd, ready, 1024, opened < count ? 1 : 10);
        for (int i = 0; i < events; i++) receive(ready[i].data.ptr);
    }
}

static void report(double seconds) {
    printf("{\"seconds\":%.4f,\"answers\":%ld,\"errors\":%ld,", seconds, seen.answers, seen.errors);
    printf("\"requests\":%ld,\"tokens\":%ld,\"bytes\":%ld,", seen.requests, seen.tokens, seen.bytes);
    printf("\"p50\":%ld,\"p99\":%ld,\"p999\":%ld,", percentile(&latency, .5), percentile(&latency, .99),
           percentile(&latency, .999));
    printf("\"first_p50\":%ld,\"first_p99\":%ld}\n", percentile(&first_token, .5),
           percentile(&first_token, .99));
}

int main(int argc, char **argv) {
    if (argc != 9 && argc != 10) return fprintf(stderr, "usage: see the top of load.c\n"), 2;
    int count = atoi(argv[2]);
    int64_t ramp = atof(argv[6]) * SECOND_NS, warm = atof(argv[7]) * SECOND_NS;
    int64_t window = atof(argv[8]) * SECOND_NS;
    port = atoi(argv[1]);
    streams = strcmp(argv[3], "stream") == 0;
    signal(SIGPIPE, SIG_IGN);
    setlinebuf(stdout);
    write_request(atol(argv[4]), atoi(argv[5]), argc > 9 ? argv[9] : "m");
    epoll_fd = epoll_create1(0);
    struct connection *all = calloc(count, sizeof *all);
    if (all == NULL) die("calloc");

    int64_t from = now_ns();
    run(all, count, from, ramp, from + ramp + warm);
    measuring = true;
    puts("open");
    int64_t opened = now_ns();
    run(all, count, from, ramp, opened + window);
    measuring = false;
    int64_t closed = now_ns();
    puts("closed");
    getchar();
    report((double)(closed - opened) / SECOND_NS);
    return 0;
}
