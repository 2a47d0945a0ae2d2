/* Is every ticket of a device seen, although a device can wake nobody, and does the daemon sleep when there is none to come?
 *
 * A worker's host thread launches steps; in each the device may post a ticket, and wait for its answer then or in a later step. The
 * device only stores: no fence of its stores orders them before a look at `asleep`, and it has no futex. So the host marks the ring
 * while a step runs, and rings after it has set the mark; the daemon, about to sleep, looks at the mark first and at the sequence
 * second, and only naps while the mark is set. Stores of host and daemon pass FIFO store buffers; those of the device arrive in any
 * order, but for its own fence, and at the latest when its step ends. The host may crash at any step and leave the mark behind. */

#define STEPS 2

#define MARK 0
#define BELL 1
#define ASLEEP 2
#define CELL 3
#define WORDS 4

byte mem[WORDS];                                /* what others see */
chan buffer[2] = [3] of { byte, byte };         /* stores on their way of host (0) and daemon (1) */
byte seq, pairs;                                /* stored by the device */
byte seq_late, pairs_late;                      /* on their way; 0: nothing */
bool queued;                                    /* the daemon, in the kernel */
byte launched, finished;                        /* steps; both are system calls of the host, in effect */
bool crashed, host_ended;

proctype Drain(byte side)
{
	byte name, value;
end:	do
	:: d_step { buffer[side] ? name, value -> mem[name] = value; name = 0; value = 0 }
	od
}

/* PCIe and the device's caches. */
proctype Arrive()
{
end:	do
	:: d_step { pairs_late > 0 -> pairs = pairs_late; pairs_late = 0 }
	:: d_step { seq_late > 0 -> seq = seq_late; seq_late = 0 }
	od
}

inline store(side, name, value) { buffer[side] ! name, value }

inline ring()
{
#ifndef NO_FENCE_IN_RING
	empty(buffer[0]);
#endif
	if
	:: mem[ASLEEP] ->
		bell++;
		store(0, BELL, bell);
		atomic { empty(buffer[0]) -> queued = false }
	:: else
	fi
}

proctype Host()
{
	byte bell, step;
	{
		do
		:: step == STEPS -> break
		:: else ->
			step++;
#ifndef NO_MARK
			store(0, MARK, step);
#endif
#ifndef MARK_WITHOUT_RING
			ring();
#endif
			atomic { empty(buffer[0]) -> launched = step };
#ifdef CLEAR_BEFORE_END
			store(0, MARK, 0);
#endif
			finished == step;
#ifndef CLEAR_BEFORE_END
			store(0, MARK, 0)
#endif
		od
	} unless { crashed };
	host_ended = true
}

/* A step that has been launched ends, whatever becomes of the host; its wait has a deadline, which passes for no reason here. */
proctype Device()
{
	byte t = 1, step;
	bool posted;
end:	do
	:: launched > step ->
		if
		:: posted -> mem[CELL] == t; posted = false; t++        /* the answer to a former step's */
		:: true
		fi;
		if
		:: !posted ->
			pairs_late = t;
#ifndef NO_DEVICE_FENCE
			pairs_late == 0;
#endif
			seq_late = t;
			posted = true;
			if
			:: mem[CELL] == t -> posted = false; t++
			:: true                                         /* a later layer's, or the next step's */
			fi
		:: true
		fi;
		seq_late == 0 && pairs_late == 0;
		atomic { step++; finished = step }
	:: posted && host_ended && launched == step && mem[CELL] == t -> posted = false; t++
	od
}

#define READY (seq == next)
#ifdef MARK_TRUSTED_FOR_EVER
#define MARKED mem[MARK] > 0
#else
#define MARKED mem[MARK] > 0 && !(crashed && host_ended)        /* nobody has renewed it for the worker's wait */
#endif

proctype Daemon()
{
	byte next = 1, seen;
	bool marked;
	do
	:: READY ->
		assert(pairs == next);
		store(1, CELL, next);
		next++
	:: else ->
		seen = mem[BELL];
		store(1, ASLEEP, 1);
#ifndef NO_FENCE_IN_SLEEP
		empty(buffer[1]);
#endif
#ifdef SEQUENCE_BEFORE_MARK
		if :: READY -> goto awake :: else fi;
		if :: MARKED -> goto awake :: else fi;
#else
		if :: MARKED -> marked = true :: else -> marked = false fi;
		if :: READY || marked -> goto awake :: else fi;
#endif
		if
		:: atomic { mem[BELL] == seen -> queued = true };
end:			!queued
		:: mem[BELL] != seen
		fi;
awake:
		store(1, ASLEEP, 0)
	od
}

/* In the end the daemon sleeps, and has answered all that arrived. The step of a dead host has nobody to answer to. */
proctype Judge()
{
	host_ended && queued && launched == finished && seq_late == 0;
	assert(crashed || mem[CELL] == seq)
}

init
{
	atomic { run Drain(0); run Drain(1); run Arrive(); run Host(); run Device(); run Daemon(); run Judge() };
	if
	:: crashed = true
	:: skip
	fi
}

ltl sleeps_at_last { <> (host_ended && queued) }
