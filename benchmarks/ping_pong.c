/* Round trips of a few bytes over a unix socket to a forked process: median and p99 in microseconds, and their number. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 64, MOST = 4000000 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    char message[BYTES] = {0};
    int ends[2], n = 0;
    double *times = malloc(MOST * sizeof(double)), until;
    if (argc != 2 || times == NULL || socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) return 1;
    if (fork() == 0) {
        close(ends[0]);
        while (recv(ends[1], message, BYTES, MSG_WAITALL) == BYTES)
            if (send(ends[1], message, BYTES, 0) != BYTES) return 1;
        return 0;
    }
    close(ends[1]);
    until = now() + atof(argv[1]) * 1e6;
    while (n < MOST) {
        double begin = now(), end;
        if (send(ends[0], message, BYTES, 0) != BYTES || recv(ends[0], message, BYTES, MSG_WAITALL) != BYTES) return 1;
        end = now();
        times[n++] = end - begin;
        if (end > until) break;
    }
    qsort(times, n, sizeof(double), ascending);
    printf("%f %f %d\n", times[n / 2], times[n * 99L / 100], n);
    return 0;
}
