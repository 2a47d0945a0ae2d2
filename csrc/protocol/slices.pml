/* One thread serves a worker in slices and carries out commands between them. Can a run that was left half copied reach a window,
 * a frame or an answer that is no longer its own?
 *
 * A worker posts two tickets: runs of either epoch, the second perhaps a CANCEL of the first. The loop takes tickets whole, but begins
 * their runs one by one, and copies each in portions; a portion is hot, or needs a frame and a read. At any moment a run's deadline may
 * pass. The control plane unbinds and binds anew through commands, and may give up waiting for one. An unbind takes several calls, and
 * looks at no task twice. Reads land whenever they like.
 * There are two tasks and one frame, so tasks are reused and runs wait for frames. */

#define TICKETS 2
#define RUNS 3          /* of ticket 0: 0 and 1, of ticket 1: 2 */
#define TASKS 2
#define PORTIONS 2
#define NOBODY 255

#ifdef SAME_EPOCH
#define EPOCH_OF(binding) 1
#else
#define EPOCH_OF(binding) (binding)
#endif

/* Between worker and loop. */
byte posted, taken;     /* tickets */
bool cancels;           /* ticket 1 is a CANCEL of ticket 0 */
byte owner[RUNS];       /* ghost: the binding that the run was posted for; its descriptor carries that one's epoch */
byte answers[RUNS];
bool cancelled, cancel_answered;

/* The loop's own. */
byte begun;             /* runs, in order */
byte run_of[TASKS];     /* NOBODY: the task is free */
mtype { READY, STARVED, READING };
mtype state[TASKS];
bool ended[TASKS];      /* answered; only its read may be in flight */
byte left[TASKS];       /* portions */
bool loaded[TASKS];     /* its portion has been read */
byte reads[TASKS];      /* in flight */
bool holds[TASKS];      /* the frame */
bool bound;
bool leaving;           /* an unbind is under way */
byte next;              /* the task that it looks at next */
byte epoch;

/* The frame: whose portion it is kept for, and whose it holds. A portion of run r is PORTION(r, left). */
#define PORTION(r, n) ((r) * 4 + (n))
byte kept_for = NOBODY, content = NOBODY;
chan disk = [TASKS + 1] of { byte, byte };      /* task, portion */
chan landed = [TASKS + 1] of { byte };          /* task */

/* Commands. */
mtype { NONE, WAITING, RUNNING, PAUSED, DONE, UNBIND, BIND };
mtype command = NONE, kind = UNBIND;
bool caller_gone;       /* it gave up waiting: its stack is no more */

byte binding;           /* ghost: who owns the window; 0 nobody */

inline answer(r)
{
	assert(answers[r] == 0);
	answers[r]++
}

/* A store into the window. */
inline store(r)
{
	assert(owner[r] == binding);
	assert(answers[r] == 0);                        /* the worker may have given the place to another run by now */
	assert(!(cancel_answered && r < 2))
}

inline release(i)
{
	if
	:: holds[i] ->
		holds[i] = false; kept_for = NOBODY; content = NOBODY;
#ifndef FRAME_FREED_SILENTLY
		if :: run_of[0] != NOBODY && state[0] == STARVED -> state[0] = READY :: else fi;
		if :: run_of[1] != NOBODY && state[1] == STARVED -> state[1] = READY :: else fi
#endif
	:: else
	fi
}

inline let_go(i)
{
	release(i);
	run_of[i] = NOBODY; ended[i] = false; loaded[i] = false; left[i] = 0; reads[i] = 0
}

/* The run is over, whatever becomes of its read. */
inline give_up(i)
{
	answer(run_of[i]);
	ended[i] = true;
#ifdef FRAME_FREED_IN_FLIGHT
	release(i);
#endif
#ifdef TASK_FREED_IN_FLIGHT
	run_of[i] = NOBODY; ended[i] = false; reads[i] = 0
#else
	if
	:: reads[i] == 0 -> let_go(i)
	:: else
	fi
#endif
}

#define live(i) (run_of[i] != NOBODY && !ended[i])

proctype Worker()
{
	byte r;
	do
	:: r < RUNS ->
		if
		:: binding != 0 -> atomic { binding != 0 -> owner[r] = binding }
		:: owner[r] = 1         /* late or hostile */
		fi;
		r++;
		if
		:: r == 2 -> posted = 1
		:: r == 3 -> if :: cancels = true :: skip fi; posted = 2
		:: else
		fi
	:: else -> break
	od
}

inline take()
{
	taken++;
#ifdef ADMIT_AT_TAKE
	admitted = bound && epoch == EPOCH_OF(owner[0]);
#endif
	if
	:: taken == 2 && cancels ->                     /* at once, before anything else of the ring */
		cancelled = true;
		if :: live(0) && run_of[0] < 2 -> give_up(0) :: else fi;
		if :: live(1) && run_of[1] < 2 -> give_up(1) :: else fi;
		cancel_answered = true;
		answer(2)
	:: else
	fi
}

#ifdef ADMIT_AT_TAKE
#define ADMITTED(r) ((r) < 2 -> admitted : bound && epoch == EPOCH_OF(owner[r]))
#elif defined(UNBIND_ADMITS_MEANWHILE)
#define ADMITTED(r) (bound && epoch == EPOCH_OF(owner[r]))
#else
#define ADMITTED(r) (bound && !leaving && epoch == EPOCH_OF(owner[r]))
#endif
#ifdef CANCEL_FORGETS_UNBEGUN
#define CANCELLED(r) false
#else
#define CANCELLED(r) (cancelled && (r) < 2)
#endif
#define TO_BEGIN (begun < 2 && taken > 0 || begun == 2 && taken == 2 && !cancels)

inline begin(i)
{
	if
	:: CANCELLED(begun) -> answer(begun)
	:: !CANCELLED(begun) -> answer(begun)           /* too late */
	:: !CANCELLED(begun) && !ADMITTED(begun) -> answer(begun)
	:: !CANCELLED(begun) && ADMITTED(begun) -> run_of[i] = begun; left[i] = PORTIONS; state[i] = READY
	fi;
	begun++
}

inline copy(i)
{
	store(run_of[i]);                               /* the first record */
	store(run_of[i]);                               /* the last one */
	left[i]--;
	if
	:: left[i] == 0 -> answer(run_of[i]); ended[i] = true; let_go(i)
	:: else
	fi
}

inline step(i)
{
	if
	:: loaded[i] ->
		assert(content == PORTION(run_of[i], left[i]));
		copy(i);
		loaded[i] = false;
		release(i)
	:: !loaded[i] -> copy(i)                        /* hot */
	:: !loaded[i] && kept_for == NOBODY ->
		holds[i] = true; kept_for = PORTION(run_of[i], left[i]);
		state[i] = READING; reads[i]++;
		disk ! i, kept_for
	:: !loaded[i] && kept_for != NOBODY -> state[i] = STARVED
	fi
}

inline reap(i)
{
	reads[i]--;
	if
#ifdef LANDING_WAKES_ENDED_RUNS
	:: ended[i] -> ended[i] = false; loaded[i] = true; state[i] = READY
#else
	:: ended[i] -> let_go(i)
#endif
	:: else -> loaded[i] = true; state[i] = READY
	fi
}

/* A run's deadline has passed. */
inline late(i)
{
	assert(state[i] != STARVED || kept_for != NOBODY);      /* nobody waits for a frame that is free */
	give_up(i)
}

inline carry_out()
{
	if
#ifdef UNBIND_LEAVES_RUNS
	:: kind == UNBIND -> bound = false; command = DONE
#else
	:: kind == UNBIND && next == 0 ->
		leaving = true;
		if :: live(0) -> give_up(0) :: else fi;
		next = 1; command = PAUSED
	:: kind == UNBIND && next == 1 ->
		if :: live(1) -> give_up(1) :: else fi;
		next = 0; leaving = false; bound = false; command = DONE
#endif
	:: kind == BIND -> epoch = EPOCH_OF(epoch + 1); bound = true; command = DONE
	fi
}

/* Each alternative is a part of a slice. */
proctype Loop()
{
	byte i;
#ifdef ADMIT_AT_TAKE
	bool admitted;
#endif
end:	do
	:: atomic { command == WAITING || command == PAUSED -> command = RUNNING };
		atomic { carry_out(); assert(!caller_gone) }
	:: atomic { taken < posted -> take() }
	:: atomic { TO_BEGIN && run_of[0] == NOBODY -> begin(0) }
	:: atomic { TO_BEGIN && run_of[1] == NOBODY -> begin(1) }
	:: live(0) && state[0] == READY -> step(0)
	:: live(1) && state[1] == READY -> step(1)
	:: atomic { landed ? i -> if :: i == 0 -> reap(0) :: else -> reap(1) fi; i = 0 }
	:: atomic { live(0) -> late(0) }
	:: atomic { live(1) -> late(1) }
	od
}

proctype Disk()
{
	byte i, portion;
end:	do
	:: atomic { disk ? i, portion -> assert(kept_for == portion); content = portion; landed ! i; i = 0; portion = 0 }
	od
}

/* Calls return when the loop has carried them out, or take back one that is not running. */
inline call(what)
{
	atomic { kind = what; caller_gone = false; command = WAITING };
	if
	:: atomic { command == DONE -> command = NONE; returned = true }
	:: atomic {
#ifdef RUNNING_COMMAND_ABANDONED
			command == WAITING || command == RUNNING || command == PAUSED ->
#else
			command == WAITING || command == PAUSED ->
#endif
			returned = false;
#if defined(ABANDONED_COMMAND_STAYS) || defined(RUNNING_COMMAND_ABANDONED)
			caller_gone = true
#else
			command = NONE
#endif
		}
	fi
}

proctype Control()
{
	bool returned;
	atomic { epoch = 1; bound = true; binding = 1 };
#ifdef UNBIND_BY_THE_CALLER
	if :: live(0) -> give_up(0) :: else fi;
	if :: live(1) -> give_up(1) :: else fi;
	bound = false; returned = true;
#else
	call(UNBIND);
#endif
	if
	:: returned -> binding = 0; binding = 2; call(BIND)
	:: else
	fi;
	timeout ->                                      /* nothing can happen any more */
	assert(answers[0] == 1 && answers[1] == 1 && answers[2] == 1);
	assert(run_of[0] == NOBODY && run_of[1] == NOBODY && kept_for == NOBODY)
}

init
{
	run_of[0] = NOBODY; run_of[1] = NOBODY;
	atomic { run Control(); run Worker(); run Loop(); run Disk() }
}
