/* Does attention ever read a set that is not the one its label stands for?
 *
 * One head with K + SLACK places. Query q wants the records q and q + 1 (mod RECORDS), so a new query misses none, one or both of the
 * records held, and both exceed the slack. Two copy threads answer runs out of order, fail in the middle, or stop for good.
 * The worker waits or goes on with the old set, and may drop its set at any lookup (a forced miss). */

#define STEPS 4
#define RECORDS 4
#define PLACES 3        /* K = 2, SLACK = 1 */
#define NONE 9
#define wants(q, record) ((record) == (q) || (record) == ((q) + 1) % RECORDS)

#define OK 1
#define ERROR 2

byte window[PLACES];                            /* what lies in the places */
chan posted = [STEPS] of { byte, byte, byte, byte };    /* ticket, record for each place or NONE */
byte cell[STEPS + 1];                           /* status by ticket */

byte held[PLACES];                              /* place list and slot map: the record of a live place, NONE if free */
byte label = NONE;
byte generation;

typedef Run { byte ticket; byte query; byte generation; byte record[PLACES] }
Run pending;                                       /* the unresolved run; ticket 0 if none */
bool quarantined[PLACES];

proctype Copier()
{
	byte t, a, b, c;
end:	do
	:: posted ? t, a, b, c ->
		if
		:: true -> goto failed                  /* a slow or broken read */
		:: true -> break                        /* stopped for good */
		:: true
		fi;
		if :: a != NONE -> window[0] = a :: else fi;
		if
		:: true -> goto failed
		:: true -> break
		:: true
		fi;
		if :: b != NONE -> window[1] = b :: else fi;
		if :: c != NONE -> window[2] = c :: else fi;
		cell[t] = OK;
		goto next;
failed:		cell[t] = ERROR;
#ifdef ANSWER_BEFORE_STOP
		if :: b != NONE -> window[1] = b :: else fi;
#endif
next:		atomic { t = 0; a = 0; b = 0; c = 0 }
	od
}

inline clear()
{
	d_step {
		for (p : 0 .. PLACES - 1) { held[p] = NONE }
#ifndef CLEAR_KEEPS_LABEL
		label = NONE;
#endif
		generation++
	}
}

#if defined(COMMIT_ON_ERROR)
#define MAY_COMMIT (pending.generation == generation)
#elif defined(IGNORE_GENERATION)
#define MAY_COMMIT (cell[pending.ticket] == OK)
#else
#define MAY_COMMIT (cell[pending.ticket] == OK && pending.generation == generation)
#endif

/* Everything changes together or nothing does; the quarantine ends, because the run is terminal. */
inline settle()
{
	d_step {
		if
		:: MAY_COMMIT ->
			for (p : 0 .. PLACES - 1) {
				if
				:: pending.record[p] != NONE -> held[p] = pending.record[p]
				:: pending.record[p] == NONE && held[p] != NONE && !wants(pending.query, held[p]) -> held[p] = NONE
				:: else
				fi
			}
			label = pending.query;
			generation++
		:: else
		fi;
		for (p : 0 .. PLACES - 1) { quarantined[p] = false; pending.record[p] = NONE }
		pending.ticket = 0
	}
}

#define HOLDS(record) (held[0] == (record) || held[1] == (record) || held[2] == (record))
#define FREE(p) (held[p] == NONE && !quarantined[p])

/* Puts one missing record into a free place of the run. */
inline name_place(wanted)
{
	if
	:: !HOLDS(wanted) ->
		p = 0;
		do
		:: p < PLACES && !(FREE(p) && pending.record[p] == NONE) -> p++
		:: else -> break
		od;
#ifdef NO_CLEAR_FIRST
		if
		:: p == PLACES ->               /* evicts a live place, as if the label could wait */
			p = 0;
			do
			:: wants(q, held[p]) || pending.record[p] != NONE -> p++
			:: else -> break
			od;
			held[p] = NONE
		:: else
		fi;
#endif
		assert(p < PLACES);
		pending.record[p] = wanted
	:: else
	fi
}

inline post()
{
	d_step {
		missing = !HOLDS(q) + !HOLDS((q + 1) % RECORDS);
		free = FREE(0) + FREE(1) + FREE(2)
	};
#ifndef NO_CLEAR_FIRST
	if :: missing > free -> clear() :: else fi;
#endif
	d_step {
#ifdef REUSE_QUARANTINED
		for (p : 0 .. PLACES - 1) { pending.record[p] = NONE }
#endif
		tickets++;
		pending.ticket = tickets;
		pending.query = q;
		pending.generation = generation;
		name_place(q);
		name_place((q + 1) % RECORDS);
#ifndef REUSE_QUARANTINED
		for (p : 0 .. PLACES - 1) { quarantined[p] = (pending.record[p] != NONE) }
#endif
		p = 0; missing = 0; free = 0
	};
	posted ! tickets, pending.record[0], pending.record[1], pending.record[2];
#ifdef LABEL_BEFORE_DATA
	label = q
#endif
}

#define COHERENT(p) (held[p] == NONE || window[p] == held[p])

/* Attention reads place by place while copies go on. */
inline attend()
{
	assert(used == label);                  /* the set is still the one that the lookup decided on */
	if
	:: label != NONE ->
		assert(HOLDS(label) && HOLDS((label + 1) % RECORDS));
		assert(COHERENT(0));
		assert(COHERENT(1));
		assert(COHERENT(2))
	:: else                                 /* a cleared head: the step ends in an error */
	fi
}

proctype Worker()
{
	byte step, q, p, tickets, missing, free, used, mine;

	do
	:: step == STEPS -> break
	:: else ->
		step++;
		if :: pending.ticket != 0 && cell[pending.ticket] != 0 -> settle() :: else fi;
		if :: clear() :: true fi;
		select(q : 0 .. RECORDS - 1);
		mine = 0;
		used = label;
		if
		:: label == q                   /* hit */
#ifdef REUSE_QUARANTINED
		:: label != q ->
#else
		:: label != q && pending.ticket != 0       /* stale: a head with an unresolved run posts no other */
		:: label != q && pending.ticket == 0 ->
#endif
			post();
			mine = pending.ticket;
			used = label            /* NONE after a clear */
		fi;
		if
		:: mine != 0 && cell[mine] != 0 -> settle(); used = label
#ifdef LATE_COMMIT
		:: mine == 0 && pending.ticket != 0 && cell[pending.ticket] != 0 -> settle()
#endif
		:: true                         /* no time to wait */
		fi;
		attend();
		d_step { q = 0; used = 0; mine = 0; p = 0 }
	od
}

init
{
	d_step {
		window[0] = NONE; window[1] = NONE; window[2] = NONE;
		held[0] = NONE; held[1] = NONE; held[2] = NONE;
		pending.record[0] = NONE; pending.record[1] = NONE; pending.record[2] = NONE
	};
	atomic { run Worker(); run Copier(); run Copier() }
}
