//! `strait top`: the dashboard of the running gateway in a terminal.
//!
//! It shows the events of `/dashboard/events`, which the page in a browser shows too, and the
//! endpoints of one service from `/status` while its tab is shown. A task reads them, a thread
//! reads the keys, and the screen is drawn after each.

mod panes;
#[cfg(test)]
mod tests;
mod view;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use http::Method;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event;
use serde::de::IgnoredAny;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use self::panes::Shown;
use self::view::View;
use crate::admin::pages::{DashboardEvent, ServiceRow, StatusPage};
use crate::cli::ask::{Admin, AdminResponse, decode, run_admin_command};
use crate::cli::text::{is_color_terminal, print};

/// Time until the next try after a lost connection, as in browsers.
const RETRY: Duration = Duration::from_secs(1);

/// Time without a byte after which the stream of events counts as lost. An event waits until the
/// state is encoded, which takes seconds in a large mesh.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Shows the dashboard of the running gateway in this terminal, updated each second.
///
/// Left, right or Tab selects a tab, up and down a row, q ends. It changes nothing. A gateway that
/// sends nothing for 30 s is asked again.
///
/// Exits 2 if the gateway does not answer at the start; later it waits for it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  strait top\n  strait top --once | grep -A9 Refusals")]
pub(in crate::cli) struct Args {
    /// Prints all tabs once, as text.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    admin: Admin,
}

/// Stream of events.
struct Events {
    admin: Admin,
    answer: AdminResponse,
    received: Vec<u8>,
    /// Service whose endpoints were asked for last, and the time of the state that had it.
    asked: Option<(String, SystemTime)>,
    /// Answer to that; none if the service was gone.
    service: Option<ServiceRow>,
}

/// Runs the command.
pub(super) fn run(args: &Args) -> ExitCode {
    run_admin_command(async {
        if !args.once && !io::stdout().is_terminal() {
            bail!("the output is not a terminal; use --once");
        }
        let mut events = Events::open(&args.admin).await?;
        let event = events.next_event().await?;
        let mut view = View::new(Shown { event, service: None });
        if args.once {
            let (name, at) = (view.service(), view.shown.event.status.at);
            view.shown.service = events.service(name, at).await?;
            print(view.text(is_color_terminal()))?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut terminal = ratatui::try_init().context("cannot use the terminal")?;
        let shown = show(&mut terminal, &mut view, events).await;
        ratatui::restore();
        shown.map(|()| ExitCode::SUCCESS)
    })
}

/// Draws until the user ends it.
async fn show(
    terminal: &mut DefaultTerminal,
    view: &mut View,
    events: Events,
) -> anyhow::Result<()> {
    let mut stop = signal(SignalKind::terminate())?;
    let (select, selected) = watch::channel(None);
    let (sender, mut updates) = mpsc::channel(1);
    tokio::spawn(send(events, selected, sender));
    let (press, mut keys) = mpsc::channel(1);
    thread::spawn(move || {
        while let Ok(key) = event::read() {
            if press.blocking_send(key).is_err() {
                return;
            }
        }
    });
    loop {
        terminal.draw(|frame| view.draw(frame))?;
        tokio::select! {
            key = keys.recv() => if key.is_none_or(|key| view.press(&key)) {
                return Ok(());
            },
            Some(update) = updates.recv() => view.update(update),
            _ = stop.recv() => return Ok(()),
        }
        select.send_replace(view.service_on_screen());
    }
}

/// Sends what is to be shown, or why there is nothing new, until the receiver is gone.
async fn send(
    mut events: Events,
    selected: watch::Receiver<Option<String>>,
    to: mpsc::Sender<anyhow::Result<Shown>>,
) {
    loop {
        let next = events.next(&selected).await;
        let is_lost = next.is_err();
        if to.send(next).await.is_err() {
            return;
        }
        if is_lost {
            sleep(RETRY).await;
            // What is left of a stream that has failed ends it again.
            events = Events::open(&events.admin).await.unwrap_or(events);
        }
    }
}

impl Events {
    async fn open(admin: &Admin) -> anyhow::Result<Self> {
        let answer = admin.request(Method::GET, "/dashboard/events", &()).await?;
        let answer = answer.successful().await?.with_deadline(SILENCE_MAX);
        let admin = admin.clone();
        Ok(Self { admin, answer, received: Vec::new(), asked: None, service: None })
    }

    /// Returns the next event, with the endpoints of the service that is then on the screen.
    async fn next(&mut self, selected: &watch::Receiver<Option<String>>) -> anyhow::Result<Shown> {
        let event = self.next_event().await?;
        let name = selected.borrow().clone();
        let service = self.service(name, event.status.at).await?;
        Ok(Shown { event, service })
    }

    /// Returns a service with its endpoints, and asks for them once for each state of the gateway.
    async fn service(
        &mut self,
        name: Option<String>,
        at: SystemTime,
    ) -> anyhow::Result<Option<ServiceRow>> {
        let Some(name) = name else { return Ok(None) };
        let wanted = (name, at);
        if self.asked.as_ref() != Some(&wanted) {
            let query = [("service", &wanted.0)];
            let page = self.admin.request(Method::GET, "/status", &query).await?;
            // The service may be gone since the event.
            self.service = match page.successful().await {
                Ok(page) => {
                    page.decode::<StatusPage<IgnoredAny>>().await?.services.list.into_iter().next()
                }
                Err(_) => None,
            };
            self.asked = Some(wanted);
        }
        Ok(self.service.clone())
    }

    async fn next_event(&mut self) -> anyhow::Result<DashboardEvent<IgnoredAny>> {
        loop {
            while let Some(end) = self.received.windows(2).position(|pair| pair == b"\n\n") {
                let block: Vec<u8> = self.received.drain(..end + 2).collect();
                if let Some(json) = block.strip_prefix(b"data: ") {
                    return decode(json);
                }
            }
            if !self.answer.read_more(&mut self.received).await? {
                bail!("the gateway has ended the stream of events");
            }
        }
    }
}
