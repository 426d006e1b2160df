/* A plain program with blocking sockets: round trips, two streams, and connections with one request.
 *
 *     socket_speed tcp|smc|rsocket serve PORT
 *     socket_speed tcp|smc|rsocket ask ADDRESS PORT TRIPS MEBIBYTES CONNECTIONS
 *
 * "smc" uses sockets of the family AF_SMC, "rsocket" the functions of librdmacm.  The server prints
 * "ready", serves one connection after the other, and ends when a client says so.  The client prints
 * one JSON object.  `tests.lab.stream_speed` does the same with Trio and has the same protocol: a
 * connection begins with a byte for its kind and the number of bytes that follow.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <endian.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { FAMILY_SMC = 43, SMALL = 64, BUFFER = 256 << 10, LARGEST = 1 << 20, WARM_UP = 40 };

static int (*do_socket)(int, int, int) = socket;
static int (*do_bind)(int, const struct sockaddr *, socklen_t) = bind;
static int (*do_listen)(int, int) = listen;
static int (*do_accept)(int, struct sockaddr *, socklen_t *) = accept;
static int (*do_connect)(int, const struct sockaddr *, socklen_t) = connect;
static ssize_t (*do_send)(int, const void *, size_t, int) = send;
static ssize_t (*do_recv)(int, void *, size_t, int) = recv;
static int (*do_close)(int) = close;
static int (*do_setsockopt)(int, int, int, const void *, socklen_t) = setsockopt;
static int family = AF_INET;
static char buffer[LARGEST];

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void use_rsocket(void)
{
    void *library = dlopen("librdmacm.so.1", RTLD_NOW);

    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
#define FROM_LIBRARY(name) *(void **)&do_##name = dlsym(library, "r" #name)
    FROM_LIBRARY(socket);
    FROM_LIBRARY(bind);
    FROM_LIBRARY(listen);
    FROM_LIBRARY(accept);
    FROM_LIBRARY(connect);
    FROM_LIBRARY(send);
    FROM_LIBRARY(recv);
    FROM_LIBRARY(close);
    FROM_LIBRARY(setsockopt);
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void send_all(int sock, const char *data, size_t count)
{
    while (count) {
        ssize_t sent = do_send(sock, data, count, MSG_NOSIGNAL);
        if (sent < 0)
            fail("send");
        data += sent;
        count -= sent;
    }
}

static void receive_all(int sock, char *data, size_t count)
{
    while (count) {
        ssize_t got = do_recv(sock, data, count, 0);
        if (got <= 0)
            fail(got ? "recv" : "the connection has ended");
        data += got;
        count -= got;
    }
}

static void without_delay(int sock)
{
    int one = 1;

    if (do_setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)))
        fail("TCP_NODELAY");
}

static int serve_one(int sock)
{
    char kind;
    uint64_t count;

    receive_all(sock, &kind, 1);
    receive_all(sock, (char *)&count, sizeof(count));
    for (count = be64toh(count); count && kind == 'e'; count -= SMALL) {
        receive_all(sock, buffer, SMALL);
        send_all(sock, buffer, SMALL);
    }
    while (count) {
        ssize_t got = do_recv(sock, buffer, BUFFER, 0);
        if (got <= 0)
            fail("recv");
        count -= got;
    }
    if (kind == 's')
        send_all(sock, &kind, 1);
    return kind != 'q';
}

static void serve(const struct sockaddr_in *address)
{
    int sock = do_socket(family, SOCK_STREAM, 0), one = 1, accepted, more = 1;

    if (sock < 0)
        fail("socket");
    do_setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (do_bind(sock, (const void *)address, sizeof(*address)) || do_listen(sock, 16))
        fail("listen");
    puts("ready");
    fflush(stdout);
    while (more) {
        accepted = do_accept(sock, NULL, NULL);
        if (accepted < 0)
            fail("accept");
        without_delay(accepted);
        more = serve_one(accepted);
        do_close(accepted);
    }
    do_close(sock);
}

static int start(const struct sockaddr_in *address, char kind, uint64_t count)
{
    int sock = do_socket(family, SOCK_STREAM, 0);
    char head[9] = { kind };

    if (sock < 0)
        fail("socket");
    if (do_connect(sock, (const void *)address, sizeof(*address)))
        fail("connect");
    without_delay(sock);
    count = htobe64(count);
    memcpy(head + 1, &count, sizeof(count));
    send_all(sock, head, sizeof(head));
    return sock;
}

static int compare(const void *one, const void *other)
{
    double difference = *(const double *)one - *(const double *)other;

    return (difference > 0) - (difference < 0);
}

static double round_trip(const struct sockaddr_in *address, int trips)
{
    double *took = calloc(trips, sizeof(*took)), began, median;
    int sock = start(address, 'e', (uint64_t)(trips + WARM_UP) * SMALL);

    for (int trip = -WARM_UP; trip < trips; trip++) {
        began = now();
        send_all(sock, buffer, SMALL);
        receive_all(sock, buffer, SMALL);
        if (trip >= 0)
            took[trip] = now() - began;
    }
    do_close(sock);
    qsort(took, trips, sizeof(*took), compare);
    median = trips % 2 ? took[trips / 2] : (took[trips / 2 - 1] + took[trips / 2]) / 2;
    free(took);
    return median;
}

static double stream(const struct sockaddr_in *address, size_t piece, int mebibytes)
{
    uint64_t count = (uint64_t)mebibytes << 20;
    int sock = start(address, 's', count);
    double began = now(), took;

    for (; count; count -= piece)
        send_all(sock, buffer, piece);
    receive_all(sock, buffer, 1);
    took = now() - began;
    do_close(sock);
    return mebibytes / took;
}

static double connections(const struct sockaddr_in *address, int count)
{
    double began = now();

    for (int each = 0; each < count; each++) {
        int sock = start(address, 'e', SMALL);
        send_all(sock, buffer, SMALL);
        receive_all(sock, buffer, SMALL);
        do_close(sock);
    }
    return count / (now() - began);
}

int main(int count, char **words)
{
    struct sockaddr_in address = { .sin_family = AF_INET };
    int asks = count == 8 && !strcmp(words[2], "ask");

    if (!asks && (count != 4 || strcmp(words[2], "serve")))
        return 2;
    if (!strcmp(words[1], "smc"))
        family = FAMILY_SMC;
    else if (!strcmp(words[1], "rsocket"))
        use_rsocket();
    address.sin_port = htons(atoi(words[asks ? 4 : 3]));
    if (!asks) {
        serve(&address);
        return 0;
    }
    if (!inet_aton(words[3], &address.sin_addr))
        return 2;
    printf("{\"round trip\": %g, ", round_trip(&address, atoi(words[5])) * 1e6);
    printf("\"64 KiB writes\": %g, ", stream(&address, 64 << 10, atoi(words[6])));
    printf("\"1 MiB writes\": %g, ", stream(&address, LARGEST, atoi(words[6])));
    printf("\"connections\": %g}\n", connections(&address, atoi(words[7])));
    do_close(start(&address, 'q', 0));
    return 0;
}
