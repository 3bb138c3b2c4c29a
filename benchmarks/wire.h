/* What the simulated worker and the load client share: a clock, a byte buffer, and the two looks
 * at an HTTP head that both need. Nothing here knows which side it is used on. */
#ifndef WIRE_H
#define WIRE_H

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define SECOND_NS 1000000000LL

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND_NS + t.tv_nsec;
}

static inline void die(const char *what) {
    perror(what);
    exit(1);
}

/* Bytes between start and end are unread; room is made at the end, consumed at the start. */
struct buffer {
    char *bytes;
    size_t start, end, capacity;
};

static inline size_t buffer_length(const struct buffer *b) { return b->end - b->start; }
static inline char *buffer_head(const struct buffer *b) { return b->bytes + b->start; }

static inline char *buffer_room(struct buffer *b, size_t wanted) {
    if (b->start == b->end) b->start = b->end = 0;
    if (b->capacity - b->end >= wanted) return b->bytes + b->end;
    memmove(b->bytes, b->bytes + b->start, buffer_length(b));
    b->end -= b->start;
    b->start = 0;
    if (b->capacity - b->end < wanted) {
        b->capacity = (b->end + wanted) * 2;
        b->bytes = realloc(b->bytes, b->capacity);
        if (b->bytes == NULL) die("realloc");
    }
    return b->bytes + b->end;
}

static inline void buffer_append(struct buffer *b, const char *bytes, size_t length) {
    memcpy(buffer_room(b, length), bytes, length);
    b->end += length;
}

static inline const char *find(const char *bytes, size_t length, const char *needle) {
    return memmem(bytes, length, needle, strlen(needle));
}

/* The value of a header in a head of `length` bytes that ends in CRLFCRLF, or NULL.
 * `name` is given as "\r\nname:" in lower case. */
static inline const char *header_value(char *head, size_t length, const char *name) {
    char last = head[length - 1];
    head[length - 1] = 0;
    const char *found = strcasestr(head, name);
    head[length - 1] = last;
    return found == NULL ? NULL : found + strlen(name) + strspn(found + strlen(name), " ");
}

static inline struct sockaddr_in loopback(int port) {
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons(port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static inline void no_delay(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

#endif
