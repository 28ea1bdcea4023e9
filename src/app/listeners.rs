//! Listeners of the data path: their sockets, and how they follow the configuration.
//!
//! A listener is identified by its address and protocol. A change of its name, sources or routing
//! keeps it open. A change of its address or protocol drains it and opens a new one. If the port of
//! a new address is in use, the old one stays open until it is free.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::Context;
use parking_lot::Mutex;
use socket2::Socket;
use tokio::runtime::Handle;
use tokio::time::sleep;
use tracing::info;

use crate::admin::{ListenerRow, ListenerState};
use crate::config::{self, Config};
use crate::datapath::accept::{self, RegisteredListener, WorkerHandle};
use crate::datapath::listener::Listener;
use crate::datapath::{DataPath, serve};
use crate::status::Status;
use crate::wire::DrainTarget;
use crate::yaml::{Finding, Findings};

use super::hand_over::sockets::{NamedSocket, Reserved, SocketName, SocketSource, Transport};
use super::supervise::{self, spawn_task, spawn_thread};
use super::thread::with_bind_context;

/// Condition of readiness: the listeners accept connections.
pub(super) const LISTENERS: &str = "listeners";

pub(super) struct Listeners {
    data_path: Arc<DataPath>,
    status: Arc<Status>,
    /// Time for which connections of a removed listener may continue.
    deadline: Duration,
    /// Addresses of the other ports, which are never dialled either.
    others: Vec<SocketAddr>,
    from: Arc<SocketSource>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// In the order of the configuration.
    entries: Vec<Entry>,
    removed: Vec<Removed>,
    /// Listeners of the last configuration, drained ones included.
    configured: Vec<config::Listener>,
    /// Present once there is a certificate.
    threads: Option<DataPathThreads>,
    /// Another process serves the listeners.
    is_released: bool,
}

/// Listener of the configuration, and its socket.
struct Entry {
    listener: Arc<Listener>,
    socket: SocketState,
    /// Error of the address that the configuration has by now.
    unmoved: Option<String>,
}

enum SocketState {
    /// Not open, for this reason.
    Closed(String),
    /// Bound, but not listening: the kernel refuses connections.
    Bound(Reserved),
    Open(Open),
}

struct Open {
    /// `None` once another process serves the listener.
    socket: Option<Arc<RegisteredListener>>,
    address: SocketAddr,
    /// The socket came from another process.
    is_inherited: bool,
}

/// Removed listener that is draining. It ends with its last connection.
struct Removed {
    row: ListenerRow,
    listener: Weak<Listener>,
}

struct DataPathThreads {
    acceptors: Handle,
    workers: Vec<WorkerHandle>,
}

impl SocketState {
    fn of(bound: anyhow::Result<Reserved>) -> Self {
        match bound {
            Ok(socket) => Self::Bound(socket),
            Err(error) => Self::Closed(format!("{error:#}")),
        }
    }
}

fn bind(listener: &config::Listener, from: &SocketSource) -> anyhow::Result<Reserved> {
    let key = format!("listeners[].bind of {}", listener.name);
    with_bind_context(from.reserve(listener.bind), &key, listener.bind)
}

fn addresses(entries: &[Entry]) -> impl Iterator<Item = SocketAddr> {
    entries.iter().filter_map(|entry| match &entry.socket {
        SocketState::Closed(_) => None,
        SocketState::Bound(bound) => bound.socket.local_addr().ok()?.as_socket(),
        SocketState::Open(open) => Some(open.address),
    })
}

impl Listeners {
    pub(super) fn new(
        (data_path, status): (&Arc<DataPath>, &Arc<Status>),
        others: Vec<SocketAddr>,
        deadline: Duration,
        from: Arc<SocketSource>,
    ) -> Self {
        let (data_path, status) = (Arc::clone(data_path), Arc::clone(status));
        let state = Mutex::default();
        Self { data_path, status, deadline, others, from, state }
    }

    /// Returns the listeners of bindings. One that is not open has no client.
    pub(super) fn bindings(&self) -> Vec<Arc<Listener>> {
        let state = self.state.lock();
        let listeners = state.entries.iter().map(|entry| &entry.listener);
        listeners.filter(|listener| listener.binding().is_some()).cloned().collect()
    }

    /// Starts the workers and accepts connections.
    ///
    /// # Errors
    /// The system lacks threads, or another process already listens on an address of the
    /// configuration.
    pub(super) fn open(&self, workers: usize) -> anyhow::Result<()> {
        let mut state = self.state.lock();
        state.threads = Some(start_workers(&self.data_path, &self.status, workers)?);
        match state.listen(&self.data_path, &self.status).into_iter().next() {
            Some(error) => Err(anyhow::Error::msg(error)),
            None => Ok(()),
        }
    }

    /// Applies new sources, routing and lines to the listeners that stay. Returns true if any has
    /// changed, so that open tunnels have to be evaluated again.
    pub(super) fn update_in_place(&self, config: &Config) -> bool {
        let mut has_changed = false;
        let all = config.all_listeners();
        for entry in &self.state.lock().entries {
            let old = entry.listener.rules();
            let same = all.iter().find(|new| old.config.is_same_socket(new)).cloned();
            // One that moves may have to stay at its old port.
            let moved = || all.iter().find_map(|new| new.at_address_of(&old.config));
            if let Some(new) = same.or_else(moved) {
                // Lines may differ although the rules are equal.
                entry.listener.replace_rules(&new);
                let is_open = matches!(entry.socket, SocketState::Open(_));
                has_changed |= is_open && new != old.config;
            }
        }
        has_changed
    }

    /// Drains the listeners that were removed from the configuration and opens the new ones, or
    /// only binds their addresses before there is a certificate. Retries those that failed.
    pub(super) fn apply(&self, config: &Config) {
        let mut state = self.state.lock();
        state.configured = config.all_listeners();
        self.follow(&mut state);
    }

    /// Closes the listeners that an operator has drained since, and opens those put back.
    pub(super) fn follow_drains(&self) {
        self.follow(&mut self.state.lock());
    }

    fn follow(&self, state: &mut State) {
        if state.is_released {
            return;
        }
        let drains = &self.data_path.reader.snapshot().balancing.evacuated;
        let is_used = |new: &config::Listener| {
            new.is_binding()
                || !drains.contains_key(&DrainTarget::Listener(new.name.as_str().into()))
        };
        let mut old = std::mem::take(&mut state.entries);
        let entry = |new: config::Listener| {
            let mut known = old.iter();
            match known.position(|entry| entry.listener.rules().config.is_same_socket(&new)) {
                Some(place) => Entry { unmoved: None, ..old.swap_remove(place) },
                None => Entry {
                    listener: Arc::new(Listener::new(&new, self.data_path.lifecycle.drain_scope())),
                    socket: SocketState::Closed(String::new()),
                    unmoved: None,
                },
            }
        };
        let used = state.configured.iter().filter(|new| is_used(new)).cloned();
        let mut entries: Vec<_> = used.map(entry).collect();
        // One that stays takes its port from others, which stay then too.
        while entries.iter_mut().filter_map(|entry| self.moved(entry, &mut old)).count() > 0 {}
        // First, because a new listener may use one of their addresses.
        for entry in old {
            self.remove(state, entry);
        }
        for entry in &mut entries {
            if let SocketState::Closed(_) = entry.socket {
                let bound = bind(&entry.listener.rules().config, &self.from);
                entry.socket = SocketState::of(bound);
            }
        }
        self.from.close_unused();
        state.entries = entries;
        let own = addresses(&state.entries).chain(self.others.iter().copied());
        self.data_path.deny.set_own(own.collect());
        state.listen(&self.data_path, &self.status);
        if state.has_only_closed() {
            self.status.pending(LISTENERS);
        } else if state.threads.is_some() {
            self.status.clear_pending(LISTENERS);
        }
    }

    /// Binds the address of a new listener whose port no old one has. If that fails, an open older
    /// version of it takes its place. Returns none if nothing has changed.
    fn moved(&self, entry: &mut Entry, old: &mut Vec<Entry>) -> Option<()> {
        let new = entry.listener.rules();
        let is_new = matches!(entry.socket, SocketState::Closed(_));
        if !is_new || addresses(old).any(|one| one.port() == new.config.bind.port()) {
            return None;
        }
        entry.socket = SocketState::of(bind(&new.config, &self.from));
        let SocketState::Closed(why) = &entry.socket else { return Some(()) };
        let place = old.iter().position(|old| {
            let is_open = matches!(old.socket, SocketState::Open(_));
            is_open && new.config.at_address_of(&old.listener.rules().config).is_some()
        })?;
        *entry = Entry { unmoved: Some(why.clone()), ..old.swap_remove(place) };
        Some(())
    }

    /// Returns descriptors of the sockets of all open listeners, for a successor.
    pub(super) fn sockets(&self) -> io::Result<Vec<NamedSocket>> {
        let state = self.state.lock();
        let open = state.entries.iter().filter_map(|entry| match &entry.socket {
            SocketState::Open(Open { socket: Some(socket), address, .. }) => {
                Some((socket, *address))
            }
            _ => None,
        });
        open.map(|(socket, address)| {
            let name = SocketName { transport: Transport::Tcp, address };
            Ok(NamedSocket { name, socket: socket.duplicate()? })
        })
        .collect()
    }

    /// Notes whether a successor has the sockets. Those that came from another process are shared
    /// in any case.
    pub(super) fn set_shared(&self, is_shared: bool) {
        for entry in &self.state.lock().entries {
            if let SocketState::Open(Open { socket: Some(socket), is_inherited, .. }) =
                &entry.socket
            {
                socket.set_shared(is_shared || *is_inherited);
            }
        }
    }

    /// Closes the sockets of all listeners, which a successor serves. Their connections stay.
    pub(super) fn release(&self) {
        let mut state = self.state.lock();
        state.is_released = true;
        for entry in &mut state.entries {
            entry.listener.drain.drain();
            if let SocketState::Open(open) = &mut entry.socket {
                open.socket = None;
            }
        }
    }

    /// Returns an error for each listener that is not open, or a warning for each of its objects.
    pub(super) fn closed(&self) -> Findings {
        self.state.lock().closed()
    }

    pub(super) fn has_closed(&self) -> bool {
        self.state.lock().entries.iter().any(|entry| entry.failure().is_some())
    }

    /// Stops accepting, drains the connections, and resets the remaining ones at the deadline.
    fn remove(&self, state: &mut State, entry: Entry) {
        let (SocketState::Open(open), Some(threads)) = (entry.socket, &state.threads) else {
            return;
        };
        entry.listener.drain.drain();
        if let Some(socket) = &open.socket {
            socket.stop();
            if open.is_inherited
                && let Ok(socket) = socket.duplicate()
            {
                // A listener of another protocol may have the address.
                self.from.give_back(open.address, socket);
            }
        }
        let (config, address) = (entry.listener.rules().config.clone(), open.address);
        info!(listener = config.name, %address, "listener removed; its connections drain");
        let listener = Arc::downgrade(&entry.listener);
        let (left, deadline) = (Weak::clone(&listener), self.deadline);
        threads.acceptors.spawn(async move {
            sleep(deadline).await;
            if let Some(listener) = left.upgrade() {
                listener.drain.close();
            }
        });
        let row =
            ListenerRow { listener: config, address, state: ListenerState::Draining, error: None };
        state.removed.push(Removed { row, listener });
    }

    /// Returns the rows of all listeners: those of the configuration, then those that are
    /// draining.
    pub(super) fn rows(&self) -> Vec<ListenerRow> {
        let mut state = self.state.lock();
        state.forget_ended();
        let own = state.entries.iter().map(|entry| {
            let config = entry.listener.rules().config.clone();
            let bind = config.bind;
            let (address, state, error) = match &entry.socket {
                SocketState::Closed(why) => (bind, ListenerState::Failed, Some(why.clone())),
                SocketState::Bound(_) => (bind, ListenerState::Waiting, None),
                SocketState::Open(open) if entry.listener.drain.is_draining() => {
                    (open.address, ListenerState::Draining, None)
                }
                SocketState::Open(open) => {
                    (open.address, ListenerState::Open, entry.unmoved.clone())
                }
            };
            ListenerRow { listener: config, address, state, error }
        });
        let removed = state.removed.iter().map(|removed| removed.row.clone());
        own.chain(removed).collect()
    }
}

impl Entry {
    /// Returns why the address of the configuration is not open.
    fn failure(&self) -> Option<&str> {
        match &self.socket {
            SocketState::Closed(why) => Some(why),
            _ => self.unmoved.as_deref(),
        }
    }
}

impl State {
    /// Returns true if the data path has started and the configuration's listeners are all closed.
    fn has_only_closed(&self) -> bool {
        let own = |entry: &&Entry| !entry.listener.rules().config.is_binding();
        let mut own = self.entries.iter().filter(own).peekable();
        self.threads.is_some()
            && own.peek().is_some()
            && own.all(|entry| matches!(entry.socket, SocketState::Closed(_)))
    }

    /// Forgets the removed listeners without a connection.
    fn forget_ended(&mut self) {
        let is_left = |removed: &Removed| removed.listener.strong_count() > 0;
        self.removed.retain(is_left);
    }

    fn closed(&self) -> Findings {
        let mut closed = Vec::new();
        for entry in &self.entries {
            let Some(why) = entry.failure() else { continue };
            let config = &entry.listener.rules().config;
            let is = match entry.unmoved {
                Some(_) => format!("is still at {}", config.bind),
                None => "is not open".to_owned(),
            };
            let what =
                format!("listener `{}` {is}: {why}; it is tried again every 10 s", config.name);
            match config.objects() {
                [] => closed.push(Finding::error(&config.line.0, what, "")),
                objects => {
                    let of = |line: &config::Line| Finding::warning(&line.0, what.clone(), "");
                    closed.extend(objects.iter().map(of));
                }
            }
        }
        closed.dedup();
        Findings(closed)
    }

    /// Listens on each bound address, if the data path has started. Returns the errors of the
    /// listeners of the configuration that fail.
    fn listen(&mut self, data_path: &Arc<DataPath>, status: &Arc<Status>) -> Vec<String> {
        self.forget_ended();
        let Some(threads) = &self.threads else {
            return Vec::new();
        };
        let mut failed = Vec::new();
        for entry in &mut self.entries {
            let place = std::mem::replace(&mut entry.socket, SocketState::Closed(String::new()));
            entry.socket = match place {
                SocketState::Bound(socket) => {
                    match open((data_path, status), threads, &entry.listener, socket) {
                        Ok(open) => SocketState::Open(open),
                        Err(error) => {
                            let error = format!("{error:#}");
                            if !entry.listener.rules().config.is_of_object() {
                                failed.push(error.clone());
                            }
                            SocketState::Closed(error)
                        }
                    }
                }
                other => other,
            };
        }
        failed
    }
}

/// Listens and accepts. Fails if another process that had bound the same address listens already.
fn open(
    (data_path, status): (&Arc<DataPath>, &Arc<Status>),
    threads: &DataPathThreads,
    listener: &Arc<Listener>,
    Reserved { socket, is_inherited }: Reserved,
) -> anyhow::Result<Open> {
    let socket = listen(&listener.rules().config, socket)?;
    let address = socket.local_addr()?;
    let registered = {
        let _runtime = threads.acceptors.enter();
        Arc::new(accept::register(socket, is_inherited)?)
    };
    let (socket, data_path) = (Arc::clone(&registered), Arc::clone(data_path));
    let (accepting, workers) = (Arc::clone(listener), threads.workers.clone());
    spawn_task((&threads.acceptors, status), "acceptor", async move {
        accept::run(&data_path, &socket, accepting, workers).await;
    });
    info!(listener = listener.rules().config.name, %address, "listener opened");
    Ok(Open { socket: Some(registered), address, is_inherited })
}

fn listen(config: &config::Listener, socket: Socket) -> anyhow::Result<TcpListener> {
    let listening = accept::listen(socket, !config.is_hbone());
    with_bind_context(listening, "listeners[].bind", config.bind)
}

/// Starts the workers. The first also accepts, and passes each socket to the least loaded worker.
fn start_workers(
    data_path: &Arc<DataPath>,
    status: &Arc<Status>,
    workers: usize,
) -> anyhow::Result<DataPathThreads> {
    let count = match workers {
        0 => std::thread::available_parallelism()?.get(),
        count => count,
    };
    let (workers, queues): (Vec<_>, Vec<_>) = (0..count).map(|_| WorkerHandle::new()).unzip();
    let spawn = |(index, queue)| {
        let data_path = Arc::clone(data_path);
        let run = async move {
            serve::run_worker(data_path, queue).await;
            // The queue has ended, but connections may remain until the process ends.
            std::future::pending::<()>().await;
        };
        spawn_thread(status, format!("strait-worker-{index}"), run)
    };
    let handles: anyhow::Result<Vec<_>> = queues.into_iter().enumerate().map(spawn).collect();
    let acceptors = handles?.into_iter().next().context("no worker")?;
    if let Some(aging) = &data_path.aging {
        aging.set_workers(workers.iter().map(|worker| worker.load.clone()).collect());
    }
    // The caller's runtime: a worker cannot watch itself.
    let watch =
        supervise::watch(workers.clone(), Arc::clone(status), Arc::clone(&data_path.metrics));
    spawn_task((&Handle::current(), status), "watchdog", watch);
    Ok(DataPathThreads { acceptors, workers })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{HostPort, Line, ObjectBindings};
    use crate::lifecycle::DrainScope;
    use crate::yaml::Place;

    #[test]
    fn each_object_of_a_binding_has_a_finding_if_it_is_not_open() {
        let addresses = "127.0.0.0/8".parse().unwrap();
        let template = ObjectBindings { addresses, clients: Vec::new(), to: Vec::new() };
        let listener = |objects: &[&str]| {
            let line = |object: &&str| Line(Place { file: object.into(), line: 0 });
            let service = (vec!["west".to_owned()], HostPort::parse("echo.app:80").unwrap());
            let local = ("echo.app".to_owned(), ([127, 0, 0, 1], 80).into());
            let objects = objects.iter().map(line).collect();
            config::Listener::from(&template.binding(service, local, objects))
        };
        let entry = Entry {
            listener: Arc::new(Listener::new(&listener(&["x", "x", "y"]), DrainScope::default())),
            socket: SocketState::Closed("of a test".to_owned()),
            unmoved: None,
        };
        let state = State { entries: vec![entry], ..State::default() };
        let closed = state.closed().0;
        let files: Vec<_> = closed.iter().map(|one| one.place.file.as_path()).collect();
        assert_eq!(files, ["x", "y"].map(std::path::Path::new));
    }

    #[test]
    fn an_address_in_use_is_reported() {
        let listener = |port| config::Listener {
            name: "a".into(),
            bind: ([127, 0, 0, 1], port).into(),
            line: Line::default(),
            sources: Vec::new(),
            balancers: Vec::new(),
            protocol: config::ListenerProtocol::Hbone {
                route_by: crate::wire::sni::RouteBy::default(),
                transit: crate::wire::Transit::Always,
            },
        };
        let from = SocketSource::default();
        let first = bind(&listener(0), &from).unwrap().socket;
        let address = first.local_addr().unwrap().as_socket().unwrap();
        let config = listener(address.port());
        let second = bind(&config, &from).unwrap().socket;
        let _first = listen(&config, first).unwrap();
        let error = listen(&config, second).unwrap_err();
        let want = format!("cannot listen on {address} (`listeners[].bind`); stop the process");
        assert!(format!("{error:#}").starts_with(&want), "{error:#}");
    }
}
