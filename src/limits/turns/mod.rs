//! Turns of a worker: which of its tasks that are ready runs next.
//!
//! tokio runs tasks in the order of their wake-ups. A source with a thousand tasks would have a
//! thousand places in this order, and another one a single place. Here a source with credit runs at
//! once, and the tasks of one that has used up its part of the round wait until nobody with credit
//! is ready (docs/decisions/0024-fair-worker-time.md).

mod time;
mod tree;
mod work;

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use pin_project_lite::pin_project;
use slab::Slab;

use self::time::Nanos;
use self::tree::Tree;
use super::Source;

pub use self::time::{ClusterSettings, ClusterTime, UsedTime, WorkerTime};
pub use self::work::{CurrentWork, Work};

/// Time of selected turns after which the sockets are polled: a task of another source may become
/// ready then.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// The same while only one source has tasks. Polls after each turn make bulk data 1.05 times as
/// dear: endpoints are read and written in smaller pieces.
const LONE_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Time after which a turn should end while other sources have tasks.
const TURN_MAX: Duration = Duration::from_micros(100);
/// Pause between two turns after which nothing was ready in between. Time of the runtime itself is
/// shorter.
const IDLE_GAP: Duration = Duration::from_micros(20);

thread_local! {
    /// Scheduler of this worker. None on threads that are no worker.
    static SCHEDULER: RefCell<Option<Scheduler>> = const { RefCell::new(None) };
}

/// Tasks of a worker, and their order.
#[derive(Debug)]
struct Scheduler {
    tree: Tree,
    tasks: Slab<Task>,
    /// Task that was taken from the tree and was woken, or runs. There is one whenever the tree is
    /// not empty.
    selected: Option<usize>,
    /// A task with credit has run since the selected one was woken.
    is_overtaken: bool,
    /// Task that runs, and the start of its turn.
    running: Option<(usize, Instant)>,
    /// Last time at which the sockets were going to be polled, and the end of the last turn.
    polled: Instant,
    ended: Instant,
    /// Task that runs once the sockets were polled.
    yielded: Option<usize>,
    current: Arc<CurrentWork>,
}

#[derive(Debug)]
struct Task {
    node: usize,
    work: Work,
    state: State,
    waker: Option<Waker>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    /// In the tree since this time.
    Ready(Instant),
    /// It was ready at this time, and runs once tokio polls it.
    Selected(Instant),
}

/// Answer to a task that tokio polls.
enum Turn {
    Now,
    Later,
    /// It is a part of the task that runs.
    Nested,
}

/// Waker of the task that runs next.
enum Next {
    AtOnce(Waker),
    AfterSockets(Waker),
}

impl Scheduler {
    fn new(time: Arc<WorkerTime>) -> Self {
        let now = Instant::now();
        Self {
            current: CurrentWork::new(&time),
            tree: Tree::new(time),
            tasks: Slab::new(),
            selected: None,
            is_overtaken: false,
            running: None,
            polled: now,
            ended: now,
            yielded: None,
        }
    }

    /// Lets a task run if its source is alone or has credit, or if it was selected. Otherwise it
    /// waits.
    fn begin(&mut self, id: usize, cx: &Context<'_>) -> (Turn, Option<Next>) {
        if self.running.is_some() {
            return (Turn::Nested, None);
        }
        let (task, now) = (&mut self.tasks[id], Instant::now());
        if self.yielded == Some(id) {
            self.yielded = None;
            self.polled = now;
        }
        match task.state {
            // A task with credit wakes others, such as that of a CONNECT, and a connection to an
            // endpoint of this host is open at once. They have credit too.
            State::Selected(_) if std::mem::take(&mut self.is_overtaken) => {
                self.polled = now;
                return (Turn::Later, Some(Next::AfterSockets(cx.waker().clone())));
            }
            State::Selected(since) => self.tree.note_wait(task.node, nanos(now - since)),
            State::Ready(_) => {
                task.set_waker(cx);
                return (Turn::Later, None);
            }
            State::Idle => {
                let node = task.node;
                if self.selected.is_none() && now - self.ended > IDLE_GAP {
                    self.tree.note_idle();
                }
                if self.tree.is_shared() && !self.tree.has_credit(node) {
                    task.state = State::Ready(now);
                    task.set_waker(cx);
                    self.tree.push(node, id);
                    let next = if self.selected.is_none() { self.select(now, true) } else { None };
                    return (Turn::Later, next);
                }
            }
        }
        self.running = Some((id, now));
        self.show(id);
        (Turn::Now, None)
    }

    /// Shows the watchdog the work of the task that runs.
    fn show(&self, id: usize) {
        let task = &self.tasks[id];
        self.current.set(task.work, self.tree.cluster(task.node));
    }

    /// Charges a turn to the source of its task. Returns the task that runs next, if one waits.
    fn end(&mut self) -> Option<Next> {
        let (id, begun) = self.running.take()?;
        self.current.set(Work::Other, 0);
        let (task, now) = (&mut self.tasks[id], Instant::now());
        self.ended = now;
        self.tree.charge(task.node, nanos(now - begun));
        if !matches!(std::mem::replace(&mut task.state, State::Idle), State::Selected(_)) {
            // A source that is alone runs without credit too, and would overtake for ever.
            self.is_overtaken = self.tree.is_shared();
            return None;
        }
        self.select(now, now - self.polled >= POLL_INTERVAL)
    }

    /// Returns true if the task that runs has to yield to the sockets before its next turn.
    fn must_yield(&mut self) -> bool {
        let shared = self.tree.is_shared();
        let interval = if shared { POLL_INTERVAL } else { LONE_POLL_INTERVAL };
        let must_yield = self.polled.elapsed() >= interval;
        if must_yield && self.yielded.is_none() {
            self.yielded = self.running.map(|(id, _)| id);
        }
        must_yield
    }

    /// Selects the task that runs next, after the sockets were polled if `is_poll_due`.
    fn select(&mut self, now: Instant, is_poll_due: bool) -> Option<Next> {
        self.selected = self.tree.pop();
        self.is_overtaken = false;
        let task = &mut self.tasks[self.selected?];
        if let State::Ready(since) = task.state {
            task.state = State::Selected(since);
        }
        let waker = task.waker.take()?;
        if !is_poll_due {
            return Some(Next::AtOnce(waker));
        }
        self.polled = now;
        Some(Next::AfterSockets(waker))
    }

    fn remove(&mut self, id: usize) -> (Task, Option<Next>) {
        let task = self.tasks.remove(id);
        self.yielded = self.yielded.filter(|it| *it != id);
        let mut next = None;
        match task.state {
            State::Idle => {}
            State::Ready(_) => self.tree.remove(task.node, id),
            State::Selected(_) => next = self.select(Instant::now(), false),
        }
        self.tree.leave(task.node);
        (task, next)
    }
}

impl Task {
    fn set_waker(&mut self, cx: &Context<'_>) {
        if !self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            self.waker = Some(cx.waker().clone());
        }
    }
}

impl Next {
    fn wake(self) {
        match self {
            Self::AtOnce(waker) => waker.wake(),
            Self::AfterSockets(waker) => wake_after_sockets(&mut Context::from_waker(&waker)),
        }
    }
}

/// Wakes a task once all others have run and the runtime has polled the sockets.
fn wake_after_sockets(cx: &mut Context<'_>) {
    // It is pending, and its waker is called even if it is dropped.
    let _ = pin!(tokio::task::yield_now()).poll(cx);
}

fn nanos(time: Duration) -> Nanos {
    Nanos::try_from(time.as_nanos()).unwrap_or(Nanos::MAX)
}

/// Makes this thread a worker, whose tasks run in the order of their sources. Returns its work.
pub fn enter(time: &Arc<WorkerTime>) -> Arc<CurrentWork> {
    SCHEDULER.with_borrow_mut(|scheduler| {
        let scheduler = scheduler.get_or_insert_with(|| Scheduler::new(Arc::clone(time)));
        Arc::clone(&scheduler.current)
    })
}

/// Calls `run` with the scheduler of this thread, if there is one, and then wakes the next task.
fn scheduled<R>(run: impl FnOnce(&mut Scheduler) -> (R, Option<Next>)) -> Option<R> {
    let with = |cell: &RefCell<Option<Scheduler>>| cell.borrow_mut().as_mut().map(run);
    let (result, next) = SCHEDULER.try_with(with).ok()??;
    // A waker may run code of tokio that ends another task.
    if let Some(next) = next {
        next.wake();
    }
    Some(result)
}

/// Charges the rest of the task that runs to another source: that of the peer whom it has verified,
/// or of the first peer. It has no effect outside of a worker.
pub fn charge_to(source: &Source) {
    scheduled(|scheduler| {
        if let Some((running, _)) = scheduler.running {
            let node = scheduler.tree.enter(source);
            let before = std::mem::replace(&mut scheduler.tasks[running].node, node);
            scheduler.tree.leave(before);
            scheduler.show(running);
        }
        ((), None)
    });
}

/// Notes the work of the task that runs, from now on. It has no effect outside of a worker.
pub fn set_work(work: Work) {
    scheduled(|scheduler| {
        if let Some((running, _)) = scheduler.running {
            scheduler.tasks[running].work = work;
            scheduler.show(running);
        }
        ((), None)
    });
}

/// Returns true if several sources have tasks on this worker.
pub fn is_shared() -> bool {
    scheduled(|scheduler| (scheduler.tree.is_shared(), None)).unwrap_or(false)
}

/// Returns true if the task that runs should end its turn soon, because another source may be
/// ready.
pub fn is_over() -> bool {
    let is_over = |scheduler: &mut Scheduler| {
        let is_shared = scheduler.tree.is_shared();
        is_shared && scheduler.running.is_some_and(|(_, begun)| begun.elapsed() >= TURN_MAX)
    };
    scheduled(|scheduler| (is_over(scheduler), None)).unwrap_or(false)
}

/// Wakes the task that runs for its next turn, after the sockets were polled if that is due. After
/// plain wake-ups alone, up to 60 turns of one connection would precede the next poll.
pub fn yield_turn(cx: &mut Context<'_>) {
    if scheduled(|scheduler| (scheduler.must_yield(), None)).unwrap_or(true) {
        wake_after_sockets(cx);
    } else {
        cx.waker().wake_by_ref();
    }
}

/// Returns the future as one whose turns are those of a source on this worker. It is unchanged on
/// other threads. Its work is a handshake until [`set_work`].
pub fn of<F: Future>(source: &Source, future: F) -> Turns<F> {
    let task = scheduled(|scheduler| {
        let node = scheduler.tree.enter(source);
        let task = Task { node, work: Work::Handshake, state: State::Idle, waker: None };
        (scheduler.tasks.insert(task), None)
    });
    Turns { future, entry: Entry(task.map_or(NO_TASK, to_id)) }
}

pin_project! {
    /// Future that runs at the turns of its source.
    #[derive(Debug)]
    pub struct Turns<F> {
        #[pin]
        future: F,
        entry: Entry,
    }
}

/// Task in the scheduler of the thread that created it, which is the one that polls and drops it.
#[derive(Debug)]
struct Entry(u32);

/// Id of a task without a scheduler.
const NO_TASK: u32 = u32::MAX;

/// Returns the id of a task. Descriptors bound the number of tasks.
fn to_id(key: usize) -> u32 {
    u32::try_from(key).unwrap_or(NO_TASK)
}

impl Entry {
    fn key(&self) -> Option<usize> {
        (self.0 != NO_TASK).then_some(self.0 as usize)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(id) = self.key() {
            // Its waker is dropped here, outside of the scheduler.
            drop(scheduled(|scheduler| scheduler.remove(id)));
        }
    }
}

/// Turn that ends on drop, also by a panic.
struct Running;

impl Drop for Running {
    fn drop(&mut self) {
        scheduled(|scheduler| ((), scheduler.end()));
    }
}

impl<F: Future> Future for Turns<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let Some(id) = this.entry.key() else { return this.future.poll(cx) };
        let _running = match scheduled(|scheduler| scheduler.begin(id, cx)) {
            Some(Turn::Later) => return Poll::Pending,
            Some(Turn::Now) => Some(Running),
            Some(Turn::Nested) | None => None,
        };
        this.future.poll(cx)
    }
}

#[cfg(test)]
mod tests;
