/* After unbind has returned, can anything of the old epoch still store into the slot's window?
 *
 * The control thread binds epoch 1, unbinds, binds the next epoch. Meanwhile a worker posts runs of any epoch at any time, a ring
 * thread validates them, copy threads store. A copy thread may stop for good in the middle of a copy. Counter and epoch go through
 * store buffers: "count first, look second" against "close first, look second" is Dekker's problem, and needs fences on both sides. */

#define RUNS 3
#define CLOSED 0
#ifdef SAME_EPOCH
#define EPOCH_OF(binding) 1
#else
#define EPOCH_OF(binding) (binding)
#endif

#define EPOCH 0
#define INFLIGHT 1

byte epoch;             /* of the slot */
byte inflight;
byte binding;           /* ghost: who owns the window; 0 nobody */
bool stopped;

#define CONTROL 0
#define RING 1
chan buffer[2] = [2] of { byte, byte };         /* the copy threads only count down, with release: no later load depends on it */

chan posted = [RUNS] of { byte, byte };         /* epoch, binding (ghost) */
chan work = [RUNS] of { byte, byte };
byte answers;

proctype Drain(byte thread)
{
	byte name, value;
end:	do
	:: d_step {
			buffer[thread] ? name, value ->
			if
			:: name == EPOCH -> epoch = value
			:: else -> inflight = inflight + value  /* a byte: 255 is -1 */
			fi;
			name = 0; value = 0
		}
	od
}

proctype Worker()
{
	byte n;
	do
	:: n == RUNS -> break
	:: n < RUNS && binding != 0 -> n++; atomic { binding != 0 -> posted ! EPOCH_OF(binding), binding }
	:: n < RUNS -> n++; posted ! EPOCH_OF(1), 1     /* a late or hostile post of the first epoch */
	od
}

proctype Ring()
{
	byte e, owner;
	bool ok;
end:	do
	:: posted ? e, owner ->
#ifdef LOOK_BEFORE_COUNT
		ok = (epoch == e);
		if :: ok -> buffer[RING] ! INFLIGHT, 1; empty(buffer[RING]) :: else fi;
#else
		buffer[RING] ! INFLIGHT, 1;
#ifndef NO_FENCE_IN_ENTER
		empty(buffer[RING]);
#endif
		ok = (epoch == e);
		if :: !ok -> buffer[RING] ! INFLIGHT, 255 :: else fi;
#endif
		if
		:: ok ->
#ifdef DISPATCH_NOT_COUNTED
			buffer[RING] ! INFLIGHT, 255;
#endif
			work ! e, owner
		:: else -> answers++                    /* STALE */
		fi;
		ok = false
	od
}

proctype Copier()
{
	byte e, owner;
end:	do
	:: work ? e, owner ->
#ifdef LEAVE_BEFORE_STORE
		inflight--;
#endif
		assert(owner == binding);               /* the first store */
		if
		:: atomic { !stopped -> stopped = true }; break
		:: true
		fi;
		assert(owner == binding);               /* the last store */
		answers++;
#if !defined(LEAVE_BEFORE_STORE) && !defined(DISPATCH_NOT_COUNTED)
		inflight--
#endif
	od
}

inline bind(n)
{
	atomic { binding = n; buffer[CONTROL] ! EPOCH, EPOCH_OF(n) };
	empty(buffer[CONTROL])
}

proctype Control()
{
	bind(1);
	buffer[CONTROL] ! EPOCH, CLOSED;
#ifndef NO_FENCE_IN_UNBIND
	empty(buffer[CONTROL]);
#endif
	if
#ifdef UNBIND_EARLY
	:: true
#else
	:: inflight == 0
#endif
		-> binding = 0; bind(2)
	:: timeout && stopped -> assert(inflight > 0)   /* DEADLINE_EXCEEDED: the slot stays closed */
	fi;
	timeout -> assert(answers + stopped == RUNS)    /* every run has ended exactly once */
}

init
{
	atomic {
		run Drain(CONTROL); run Drain(RING);
		run Control(); run Worker(); run Ring(); run Copier(); run Copier()
	}
}
