//! Listening sockets from another process, and their hand-over to the next one
//! (`strait run --take-over SOCKET`).
//!
//! The successor receives all listening sockets, starts beside the predecessor, and asks whether it
//! may accept. It accepts, and reports that. The predecessor then answers, closes its descriptors
//! and drains; a successor that gives up before the answer makes it fail. Connections that wait in
//! the accept queue of a socket are those of either process, so none is refused. A successor that
//! fails before that changes nothing.

mod channel;
pub(super) mod sockets;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use parking_lot::Mutex;
use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::config::Discovery;
use crate::lifecycle::Phase;
use crate::status::HeldRemovals;

use super::state::App;
use channel::{Channel, Message, PACKET_DEADLINE, Server, check_folder};
use sockets::SocketSource;

/// Deadline from the sockets to the readiness of a successor: a start behind a control plane that
/// is reached at the last attempt.
pub(super) const START_DEADLINE: Duration = Duration::from_secs(10 * 60);
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Sockets of this process, and its place between a predecessor and a successor.
#[derive(Debug, Default)]
pub(super) struct HandOver {
    /// Path of the socket between the processes.
    path: Option<PathBuf>,
    predecessor: Mutex<Option<Channel>>,
    pub(super) sockets: Arc<SocketSource>,
    /// Cancelled once the ports beside the data path are served: at the start, or when the
    /// predecessor stops to serve them.
    pub(super) ports: CancellationToken,
}

impl HandOver {
    /// Takes the sockets of systemd, and those of the process that waits on `path`, if there is
    /// one.
    ///
    /// # Errors
    /// Another user could write to the folder of the path, or the predecessor does not answer.
    pub(super) fn begin(path: Option<&Path>) -> anyhow::Result<Self> {
        let mut inherited = Vec::new();
        let mut predecessor = None;
        if let Some(path) = path {
            check_folder(path)?;
            predecessor = Channel::connect(path).context("cannot reach the process that serves")?;
        }
        if let Some(channel) = &predecessor {
            inherited = channel.receive_sockets().context(
                "cannot take over from the process that serves; if it is draining, or another \
                 process takes over, start again once that has ended",
            )?;
        }
        let ports = CancellationToken::new();
        if predecessor.is_none() {
            ports.cancel();
        }
        Ok(Self {
            path: path.map(Path::to_owned),
            predecessor: Mutex::new(predecessor),
            sockets: Arc::new(SocketSource::new(inherited, path.is_some())),
            ports,
        })
    }

    /// Returns true if a predecessor serves until this process is ready.
    pub(super) fn has_predecessor(&self) -> bool {
        self.predecessor.lock().is_some()
    }

    /// Asks the predecessor, if there is one, whether this process may accept: a refusal later
    /// would reset the connections that it has accepted. Blocks for a moment.
    ///
    /// # Errors
    /// The predecessor goes on.
    pub(super) fn ask(&self) -> anyhow::Result<()> {
        let (predecessor, path) = (self.predecessor.lock(), &self.path);
        let (Some(channel), Some(path)) = (&*predecessor, path) else { return Ok(()) };
        report((channel, path), &Message::Prepared, &Message::Allowed)
    }

    /// Replaces the predecessor, once this process serves, and waits for a successor. Reports the
    /// readiness to systemd. Blocks for a moment.
    ///
    /// # Errors
    /// The predecessor goes on, or the path cannot be used.
    pub(super) fn complete(self: &Arc<Self>, app: &App) -> anyhow::Result<()> {
        self.ports.cancel();
        // Before the predecessor ends its part: it goes on if the path cannot be used.
        let server = self.path.as_deref().map(Server::bind).transpose()?;
        let predecessor = self.predecessor.lock().take();
        let mut state = vec![NotifyState::Ready];
        let has_replaced = predecessor.is_some();
        if let (Some(channel), Some(path)) = (predecessor, &self.path) {
            let released = report((&channel, path), &Message::Ready, &Message::Released);
            // Its answer decides which process goes on: it is here by now, or cannot be sent.
            released.or_else(|error| channel.expect_last(&Message::Released).map_err(|_| error))?;
            // It closes the channel after its sockets.
            channel.wait_for_end();
            state.push(NotifyState::MainPid(std::process::id()));
            info!("took over from the process that served");
        }
        for name in self.sockets.close_unused() {
            warn!(
                address = %name.address,
                "a socket of another process is used by no key, and connections to it wait \
                 unanswered while that process has it; change `bind`, or `ListenStream=` of \
                 strait.socket"
            );
        }
        if let Some(Err(error)) = server.map(|server| self.wait(server, app)) {
            if !has_replaced {
                return Err(error);
            }
            // Nobody else serves now.
            let error = format!("{error:#}");
            error!(error, "no process can take over from this one");
        }
        notify(&state);
        Ok(())
    }

    /// Waits for a successor in a thread of its own.
    fn wait(self: &Arc<Self>, mut server: Server, app: &App) -> anyhow::Result<()> {
        server.replace()?;
        let (own, app) = (Arc::clone(self), app.clone());
        let wait = move || own.wait_for_successor(&server, &app);
        thread::Builder::new().name("strait-take-over".to_owned()).spawn(wait)?;
        Ok(())
    }

    fn wait_for_successor(&self, server: &Server, app: &App) {
        loop {
            let channel = match server.accept() {
                Ok(channel) => channel,
                Err(error) => {
                    warn!(%error, "a process could not take over");
                    thread::park_timeout(ACCEPT_PAUSE);
                    continue;
                }
            };
            if app.data_path.lifecycle.phase() != Phase::Running {
                return;
            }
            match self.hand_over(&channel, app) {
                Ok(()) => return,
                Err(error) => {
                    app.listeners.set_shared(false);
                    app.status.is_handing_over.store(false, Ordering::Relaxed);
                    let error = format!("{error:#}");
                    warn!(%error, "the next process failed before it was ready; this one goes on");
                    // It may be gone.
                    let _ = channel.send(&Message::Refused { error });
                }
            }
        }
    }

    /// Hands the sockets over, and drains once the successor serves.
    fn hand_over(&self, channel: &Channel, app: &App) -> anyhow::Result<()> {
        check_hold(app)?;
        info!("the next process starts with the sockets of this one");
        // Before the successor reads the file of drains.
        app.status.is_handing_over.store(true, Ordering::Relaxed);
        app.listeners.set_shared(true);
        let mut sockets = app.listeners.sockets()?;
        sockets.extend(self.sockets.kept()?);
        channel.send_sockets(&sockets)?;
        drop(sockets);
        channel.expect(&Message::Prepared, START_DEADLINE)?;
        check_hold(app)?;
        channel.send(&Message::Allowed)?;
        channel.expect(&Message::Ready, PACKET_DEADLINE)?;
        // Before the release, because it fails if the successor has given up. Before the drain,
        // which ends the process at once if it has no connection: a successor without this answer
        // takes this process for one that goes on.
        channel.send(&Message::Released)?;
        info!("the next process serves; this one drains");
        app.listeners.release();
        self.sockets.release();
        app.data_path.lifecycle.hand_over();
        Ok(())
    }
}

/// Refuses a hand-over while removals are held, unless the cache has what they keep: the first
/// state of a successor would be the mesh without it.
fn check_hold(app: &App) -> anyhow::Result<()> {
    let stream = app.status.discovery().unwrap_or_default();
    let objects = app.status.objects_cache.lock().clone();
    let caches = [(stream.saved, stream.save_error), (objects.saved, objects.save_error)];
    let of_objects = match app.config.load().discovery {
        Discovery::Kubernetes(_) => "discovery.cache",
        _ => "exposure.kubernetes.cache",
    };
    let keys = ["discovery.cache", of_objects];
    for ((hold, cache), key) in app.status.held().into_iter().zip(caches).zip(keys) {
        let Some(by) = hold.as_ref().map(HeldRemovals::by) else { continue };
        let lack = match cache {
            (Some(_), None) => continue,
            (None, None) => format!("there is no `{key}`"),
            (_, Some(error)) => format!("the last write of `{key}` failed ({error}),"),
        };
        bail!(
            "removals by {by} are held, and {lack} from which the next process would have what \
             they keep; start it again after `discovery.hold` or `strait release`"
        )
    }
    Ok(())
}

/// Reports a state of this process to the predecessor, and waits for its answer. One that has ended
/// meanwhile needs no report.
fn report(
    (channel, path): (&Channel, &Path),
    state: &Message,
    answer: &Message,
) -> anyhow::Result<()> {
    let answered = channel.send(state).and_then(|()| channel.expect(answer, PACKET_DEADLINE));
    let Err(error) = answered else { return Ok(()) };
    if Channel::connect(path)?.is_none() {
        warn!(%error, "the process that served has ended");
        return Ok(());
    }
    bail!("the process that serves did not wait for this one: {error:#}");
}

/// Reports a state to systemd (`sd_notify(3)`), if it has started this process.
pub(super) fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        warn!(%error, "cannot report the state to systemd");
    }
}
