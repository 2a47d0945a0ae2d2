/* Is a sleeping side always woken?
 *
 * Worker (side 0) and daemon (side 1) play ping-pong. Every store goes through a FIFO store buffer (TSO): it becomes visible to the
 * other side at some later step, and only a fence or a system call waits for that. Neither side may need its deadline unless
 * the peer has crashed, so a lost wake-up shows as an invalid end state. */

#define ROUNDS 2
#define POISONED 1

#define SEQ 0
#define ASLEEP 1
#define BELL 2
#define POISON 3
#define WORDS 4
#define word(side, name) mem[(side) * WORDS + (name)]

byte mem[2 * WORDS];                            /* what the other side sees */
chan buffer[2] = [3] of { byte, byte };         /* stores on their way: word, value */
bool queued[2];                                 /* in the kernel, in futex_wait */
bool crashed[2];
bool ended[2];

proctype Drain(byte side)
{
	byte name, value;
end:	do
	:: d_step { buffer[side] ? name, value -> word(side, name) = value; name = 0; value = 0 }
	od
}

inline store(name, value) { buffer[me] ! name, value }
inline fence() { empty(buffer[me]) }

inline wake()
{
	atomic { empty(buffer[me]) -> queued[peer] = false }
}

inline ring()
{
#ifndef NO_FENCE_IN_RING
	fence();
#endif
	if
	:: word(peer, ASLEEP) ->
#ifdef WAKE_BEFORE_BELL
		wake();
#endif
#ifndef NO_BELL
		bell++;
		store(BELL, bell);
#endif
#ifndef WAKE_BEFORE_BELL
		wake()
#endif
	:: else
	fi
}

#define DEAD (poisoned || word(peer, POISON))
#define READY (word(peer, SEQ) == t)

/* The kernel compares and queues under one lock. One return for no reason is allowed; more would hide a lost wake-up. */
inline futex_wait()
{
	if
	:: atomic { word(peer, BELL) == seen -> queued[me] = true };
		if
		:: !queued[me]
		:: !stirred -> stirred = true; queued[me] = false
		:: crashed[peer] -> queued[me] = false; late = true
		fi
	:: word(peer, BELL) != seen
	fi
}

inline wait()
{
	if
	:: DEAD || READY
	:: else ->
		do
		::
#ifndef BELL_READ_LATE
			seen = word(peer, BELL);
#endif
#ifdef ASLEEP_AFTER_RECHECK
			if :: DEAD || READY -> break :: else fi;
#endif
			store(ASLEEP, 1);
#ifndef NO_FENCE_IN_SLEEP
			fence();
#endif
#ifdef BELL_READ_LATE
			if :: DEAD || READY -> break :: else fi;
			seen = word(peer, BELL);
#else
#if !defined(NO_RECHECK) && !defined(ASLEEP_AFTER_RECHECK)
			if :: DEAD || READY -> break :: else fi;
#endif
#endif
			if :: late -> break :: else fi;
			futex_wait()
		od;
		store(ASLEEP, 0)
	fi;
	if
	:: DEAD -> dead = true
	:: !DEAD && READY
	:: else -> assert(crashed[peer]); dead = true   /* a deadline passes only beside a dead peer */
	fi
}

inline poison()
{
	poisoned = true;
	store(POISON, POISONED);
#ifndef SILENT_POISON
	ring()
#endif
}

/* A side publishes its sequence, or at any time gives the ring up. */
inline publish()
{
	if
	:: store(SEQ, t); ring()
	:: poison()
	fi
}

proctype Side(byte me)
{
	byte peer = 1 - me, t = 1, seen, bell;
	bool poisoned, dead, stirred, late;

	{
		do
		:: t > ROUNDS -> break
		:: else ->
			if :: me == 1 -> wait() :: else fi;
			if :: !dead -> publish() :: else fi;
			if :: me == 0 && !poisoned -> wait() :: else fi;
			if
			:: poisoned -> break
			:: !poisoned && dead -> poison(); break
			:: else -> t++
			fi
		od
	} unless { crashed[me] };
	ended[me] = true
}

init
{
	atomic { run Drain(0); run Drain(1); run Side(0); run Side(1) };
	if
	:: crashed[0] = true
	:: crashed[1] = true
	:: skip
	fi
}

ltl both_end { <> (ended[0] && ended[1]) }
