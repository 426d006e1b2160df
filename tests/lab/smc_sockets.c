/* Preloaded into a program: its TCP sockets over IPv4 are the kernel's SMC sockets, of the family
 * AF_SMC, or of the protocol IPPROTO_SMC when SMC_BY is "protocol".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { FAMILY_SMC = 43, PROTOCOL_SMC = 256 };

int socket(int family, int type, int protocol)
{
    int (*real)(int, int, int) = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
    int stream = (type & ~(SOCK_NONBLOCK | SOCK_CLOEXEC)) == SOCK_STREAM;
    const char *by = getenv("SMC_BY");

    if (family != AF_INET || !stream || (protocol && protocol != IPPROTO_TCP))
        return real(family, type, protocol);
    if (by && !strcmp(by, "protocol"))
        return real(family, type, PROTOCOL_SMC);
    return real(FAMILY_SMC, type, 0);
}
