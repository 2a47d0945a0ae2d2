/* A device that pulls reads the daemon's frames itself: is a frame evicted while it reads, and is every frame free again in the end?
 *
 * A cell names the frame that holds the ticket's records; the frame stays pinned until the worker says, with one word `released` in the
 * requests, that it has finished reading what tickets up to that number named. The worker may have two tickets in flight and reads
 * them in any order. The daemon has two frames, evicts whatever is not pinned, and pins for a bounded time: a worker that releases
 * nothing for longer is poisoned, and reads on nothing that it commits. Either side may crash at any step. */

#define TICKETS 3
#define FRAMES 2
#define NONE 9
#define WORKER 1
#define DAEMON 2

byte crashed;
byte posted;                    /* tickets */
byte frame_of[TICKETS + 1];     /* the cell: NONE until it is answered */
byte released;
bool poisoned;

byte content[FRAMES];           /* which ticket's records */
byte pinned[FRAMES];            /* by which ticket; 0: by none */
bool finished[TICKETS + 1];     /* worker: read to the end */

inline read(t)
{
	assert(content[frame_of[t]] == t || poisoned);  /* what is read beside poison is committed nowhere */
	assert(content[frame_of[t]] == t || poisoned);
	finished[t] = true
}

#ifdef RELEASED_MAX
#define RELEASE(t) released = (t > released -> t : released)
#elif defined(RELEASED_BEFORE_READ)
#define RELEASE(t) skip
#else
#define RELEASE(t) \
	if \
	:: finished[1] && finished[2] && finished[3] -> released = 3 \
	:: finished[1] && finished[2] && !finished[3] -> released = 2 \
	:: finished[1] && !finished[2] -> released = 1 \
	:: !finished[1] -> skip \
	fi
#endif

#ifdef RELEASED_BEFORE_READ
#define BEFORE(t) released = t
#define MAY_READ(t) (finished[t - 1])
#else
#define BEFORE(t) skip
#define MAY_READ(t) true
#endif

#define PULL(t) \
	:: posted >= t && frame_of[t] != NONE && !finished[t] && MAY_READ(t) -> BEFORE(t); read(t); d_step { RELEASE(t) }

proctype Worker()
{
	finished[0] = true;
	{
		do
		:: posted < TICKETS && posted < released + 2 -> posted++
		PULL(1) PULL(2) PULL(3)
		:: finished[TICKETS] && finished[1] && finished[2] -> break
		:: poisoned -> break
		:: timeout && crashed == DAEMON -> break
		od
	} unless { crashed == WORKER }
}

proctype Loop()
{
	byte t = 1, f;
	{
end:		do
		:: t <= posted && !poisoned && (pinned[0] == 0 || pinned[1] == 0) ->
			if
			:: pinned[0] == 0 -> f = 0
			:: pinned[1] == 0 -> f = 1
			fi;
			content[f] = 0;                         /* evicted, and read anew */
			content[f] = t;
#ifndef UNPIN_AT_ANSWER
			pinned[f] = t;
#endif
			frame_of[t] = f;
			t++
#ifdef RELEASED_TAKEN_AS_NEXT
		:: pinned[0] > 0 && released + 1 >= pinned[0] -> pinned[0] = 0
		:: pinned[1] > 0 && released + 1 >= pinned[1] -> pinned[1] = 0
#else
		:: pinned[0] > 0 && released >= pinned[0] -> pinned[0] = 0
		:: pinned[1] > 0 && released >= pinned[1] -> pinned[1] = 0
#endif
#ifndef PINS_FOR_EVER
		:: crashed == WORKER && (pinned[0] > 0 || pinned[1] > 0) ->      /* its time is over, or its connection */
			poisoned = true; pinned[0] = 0; pinned[1] = 0
#endif
#ifdef UNPIN_WITHOUT_POISON
		:: pinned[0] > 0 -> pinned[0] = 0                               /* "it has had long enough" */
#endif
		od
	} unless { crashed == DAEMON }
}

/* The frames of a daemon that lives are free once its worker is done. */
proctype Judge()
{
	(timeout);
	assert(crashed == DAEMON || (pinned[0] == 0 && pinned[1] == 0))
}

init
{
	atomic {
		frame_of[1] = NONE; frame_of[2] = NONE; frame_of[3] = NONE;
		run Worker(); run Loop(); run Judge()
	};
	if
	:: crashed = WORKER
	:: crashed = DAEMON
	:: skip
	fi
}
