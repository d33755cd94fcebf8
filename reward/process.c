/* Runs a command with both pipes served by one poll loop and one deadline.
 *
 * Invariants: both pipe ends of ours are closed and the child is reaped on every way out; on an
 * error the child's process group is killed before the child is reaped, so that its id cannot have
 * been given to another process. */
#include "reward/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct Process {
  pid_t pid;
  int in, out; /* our ends; -1 when closed */
  double deadline;
  ProcessLimits limits;
  const char *input;
  size_t input_len, written;
  char *output;
  size_t output_len, capacity;
  size_t line_start; /* of the line being read */
  int lines;         /* whole ones so far */
} Process;

static double now_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- start ---- */

/* Our ends are not inherited by any child; the child's ends lose that mark when they become its
 * standard input and output. */
static int open_pipes(int in[2], int out[2], Error *err) {
  if (pipe2(in, O_CLOEXEC)) return error_set(err, "cannot make a pipe: %s", strerror(errno));
  if (pipe2(out, O_CLOEXEC)) {
    int cause = errno;
    close(in[0]);
    close(in[1]);
    return error_set(err, "cannot make a pipe: %s", strerror(cause));
  }
  fcntl(in[1], F_SETFL, O_NONBLOCK);
  fcntl(out[0], F_SETFL, O_NONBLOCK);
  return 0;
}

static int spawn_shell(const char *command, int in, int out, pid_t *pid) {
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attr;
  posix_spawn_file_actions_init(&files);
  posix_spawnattr_init(&attr);
  posix_spawn_file_actions_adddup2(&files, in, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&files, out, STDOUT_FILENO);
  sigset_t none, defaults;
  sigemptyset(&none);
  sigemptyset(&defaults);
  sigaddset(&defaults, SIGPIPE); /* `command | head` must end as in a shell */
  posix_spawnattr_setsigmask(&attr, &none);
  posix_spawnattr_setsigdefault(&attr, &defaults);
  posix_spawnattr_setpgroup(&attr, 0);
  posix_spawnattr_setflags(&attr,
                           POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  char *const argv[] = {"sh", "-c", (char *)command, NULL};
  int rc = posix_spawn(pid, "/bin/sh", &files, &attr, argv, environ);
  posix_spawnattr_destroy(&attr);
  posix_spawn_file_actions_destroy(&files);
  return rc;
}

static int process_start(Process *p, const char *command, Error *err) {
  int in[2] = {-1, -1}, out[2] = {-1, -1};
  if (open_pipes(in, out, err)) return -1;
  int rc = spawn_shell(command, in[0], out[1], &p->pid);
  close(in[0]);
  close(out[1]);
  p->in = in[1];
  p->out = out[0];
  if (rc == 0) return 0;
  close(p->in);
  close(p->out);
  return error_set(err, "cannot start /bin/sh: %s", strerror(rc));
}

/* ---- input and output ---- */

static void close_end(int *fd) {
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

/* SIGPIPE is blocked around the loop: a command that stops reading shows as EPIPE, which is its
 * good right. */
static int write_some(Process *p, Error *err) {
  ssize_t n = write(p->in, p->input + p->written, p->input_len - p->written);
  if (n >= 0) p->written += (size_t)n;
  bool refused = n < 0 && errno == EPIPE;
  if (n < 0 && !refused && errno != EAGAIN && errno != EINTR)
    return error_set(err, "cannot write to it: %s", strerror(errno));
  if (refused || p->written == p->input_len) close_end(&p->in);
  return 0;
}

/* Counts the lines in the n bytes just read; floods end here, not when memory is full. */
static int check_lines(Process *p, size_t n, Error *err) {
  for (size_t i = p->output_len; i < p->output_len + n; i++) {
    if (p->lines >= p->limits.lines)
      return error_set(err, "it printed more than %d line%s", p->limits.lines,
                       p->limits.lines == 1 ? "" : "s");
    if (i - p->line_start >= p->limits.line_bytes)
      return error_set(err, "line %d of its output is longer than %zu bytes", p->lines + 1,
                       p->limits.line_bytes);
    if (p->output[i] != '\n') continue;
    p->lines++;
    p->line_start = i + 1;
  }
  p->output_len += n;
  return 0;
}

static int read_some(Process *p, Error *err) {
  if (p->capacity - p->output_len < 4096) {
    p->capacity = 2 * p->capacity + 8192;
    p->output = mem_grow(p->output, p->capacity, 1);
  }
  /* One byte stays free for the final NUL. */
  ssize_t n = read(p->out, p->output + p->output_len, p->capacity - p->output_len - 1);
  if (n > 0) return check_lines(p, (size_t)n, err);
  if (n == 0) close_end(&p->out);
  if (n < 0 && errno != EAGAIN && errno != EINTR)
    return error_set(err, "cannot read its output: %s", strerror(errno));
  return 0;
}

/* Milliseconds for poll, rounded up so that it does not spin at the end; -1: the time is up. */
static int time_left(const Process *p, Error *err) {
  double left = p->deadline - now_seconds();
  if (left <= 0)
    return error_set(err, "it did not finish within %g seconds and was killed", p->limits.seconds);
  return left < 1e6 ? (int)(left * 1e3) + 1 : 1000000000;
}

static int exchange(Process *p, Error *err) {
  if (p->input_len == 0) close_end(&p->in);
  while (p->out >= 0) {
    int ms = time_left(p, err);
    if (ms < 0) return -1;
    struct pollfd fd[2] = {{.fd = p->out, .events = POLLIN}, {.fd = p->in, .events = POLLOUT}};
    if (poll(fd, 2, ms) < 0 && errno != EINTR)
      return error_set(err, "cannot wait for it: %s", strerror(errno));
    if (fd[1].revents && write_some(p, err)) return -1;
    if (fd[0].revents && read_some(p, err)) return -1;
  }
  close_end(&p->in); /* what it may still read cannot change its answer */
  p->output[p->output_len] = 0;
  return 0;
}

/* ---- end ---- */

/* Waits for the exit without reaping. The output has ended, so this is nearly always at once. */
static int await_exit(Process *p, Error *err) {
  struct timespec pause = {.tv_nsec = 100000};
  for (;;) {
    siginfo_t info = {.si_pid = 0};
    if (waitid(P_PID, (id_t)p->pid, &info, WEXITED | WNOHANG | WNOWAIT) && errno != EINTR)
      return error_set(err, "cannot wait for its exit: %s", strerror(errno));
    if (info.si_pid == p->pid) {
      if (info.si_code == CLD_EXITED && info.si_status == 0) return 0;
      if (info.si_code == CLD_EXITED)
        return error_set(err, "it exited with status %d", info.si_status);
      return error_set(err, "it was killed by signal %d (%s)", info.si_status,
                       strsignal(info.si_status));
    }
    if (time_left(p, err) < 0) return -1;
    nanosleep(&pause, NULL);
    if (pause.tv_nsec < 20000000) pause.tv_nsec *= 2;
  }
}

static int run_started(Process *p, Error *err) {
  int rc = exchange(p, err);
  if (rc == 0) rc = await_exit(p, err);
  if (rc) kill(-p->pid, SIGKILL);
  close_end(&p->in);
  close_end(&p->out);
  while (waitpid(p->pid, NULL, 0) < 0 && errno == EINTR) continue;
  return rc;
}

/* Blocks SIGPIPE in this thread for the call, and takes away the one that the call raised. */
static int without_sigpipe(Process *p, Error *err) {
  sigset_t sigpipe, before, pending;
  sigemptyset(&sigpipe);
  sigaddset(&sigpipe, SIGPIPE);
  sigpending(&pending);
  pthread_sigmask(SIG_BLOCK, &sigpipe, &before);
  int rc = run_started(p, err);
  if (!sigismember(&pending, SIGPIPE))
    while (sigtimedwait(&sigpipe, NULL, &(struct timespec){0}) < 0 && errno == EINTR) continue;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return rc;
}

int process_run(const char *command, const char *input, size_t input_len, ProcessLimits limits,
                char **output, size_t *output_len, Error *err) {
  Process p = {.limits = limits,
               .deadline = now_seconds() + limits.seconds,
               .input = input,
               .input_len = input_len};
  *output = NULL;
  *output_len = 0;
  if (process_start(&p, command, err)) return -1;
  if (without_sigpipe(&p, err)) {
    free(p.output);
    return -1;
  }
  *output = p.output;
  *output_len = p.output_len;
  return 0;
}
