/* A plain program that knows nothing of SMC: echoes one connection, or has one echoed.
 *
 *     plain_echo serve PORT
 *     plain_echo ask ADDRESS PORT BYTES
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void send_all(int sock, const char *data, size_t count)
{
    while (count) {
        ssize_t sent = send(sock, data, count, MSG_NOSIGNAL);
        if (sent < 0)
            fail("send");
        data += sent;
        count -= sent;
    }
}

static void serve(int sock, struct sockaddr_in *address)
{
    static char data[65536];
    ssize_t got;
    int one = 1, accepted;

    setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(sock, (struct sockaddr *)address, sizeof(*address)) || listen(sock, 4))
        fail("listen");
    puts("listening");
    fflush(stdout);
    accepted = accept(sock, NULL, NULL);
    if (accepted < 0)
        fail("accept");
    while ((got = recv(accepted, data, sizeof(data), 0)) > 0)
        send_all(accepted, data, got);
    if (got < 0)
        fail("recv");
    close(accepted);
}

static void ask(int sock, struct sockaddr_in *address, size_t count)
{
    static char data[4096], back[4096];
    size_t done, place;

    if (connect(sock, (struct sockaddr *)address, sizeof(*address)))
        fail("connect");
    for (done = 0; done < count; done += sizeof(data)) {
        for (place = 0; place < sizeof(data); place++)
            data[place] = (char)((done + place) * 31 >> 3);
        send_all(sock, data, sizeof(data));
        if (recv(sock, back, sizeof(back), MSG_WAITALL) != sizeof(back))
            fail("recv");
        if (memcmp(data, back, sizeof(back))) {
            fprintf(stderr, "byte %zu and more came back as others\n", done);
            exit(1);
        }
    }
    shutdown(sock, SHUT_WR);
    if (recv(sock, back, sizeof(back), 0) != 0)
        fail("end");
    printf("%zu bytes came back\n", done);
}

int main(int count, char **words)
{
    struct sockaddr_in address = { .sin_family = AF_INET };
    int serving = count == 3, sock = socket(AF_INET, SOCK_STREAM, 0);

    if (sock < 0)
        fail("socket");
    if (!serving && count != 5)
        return 2;
    address.sin_port = htons(atoi(words[serving ? 2 : 3]));
    address.sin_addr.s_addr = serving ? INADDR_ANY : inet_addr(words[2]);
    if (serving)
        serve(sock, &address);
    else
        ask(sock, &address, atoi(words[4]));
    close(sock);
    return 0;
}
