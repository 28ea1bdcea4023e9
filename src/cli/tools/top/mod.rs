//! `strait top`: the dashboard of the running gateway in a terminal.
//!
//! It shows the events of `/dashboard/events`, which the page in a browser shows too, and the
//! endpoints of one service from `/status`. A task reads them, a thread reads the keys, and the
//! screen is drawn after each.

mod panes;
#[cfg(test)]
mod tests;
mod view;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

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
use crate::admin::pages::{DashboardEvent, StatusPage};
use crate::cli::ask::{Admin, AdminResponse, decode, run_admin_command};
use crate::cli::text::{is_color_terminal, print};

/// Time until the next try after a lost connection, as in browsers.
const RETRY: Duration = Duration::from_secs(1);

/// Shows the dashboard of the running gateway in this terminal, updated each second.
///
/// Left, right or Tab selects a tab, up and down a row, q ends. It changes nothing.
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
}

/// Runs the command.
pub(super) fn run(args: &Args) -> ExitCode {
    run_admin_command(async {
        if !args.once && !io::stdout().is_terminal() {
            bail!("the output is not a terminal; use --once");
        }
        let mut events = Events::open(&args.admin).await?;
        let mut view = View::new(events.next(None).await?);
        if args.once {
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
    let (select, selected) = watch::channel(view.service());
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
        select.send_replace(view.service());
    }
}

/// Sends what is to be shown, or why there is nothing new, until the receiver is gone.
async fn send(
    mut events: Events,
    selected: watch::Receiver<Option<String>>,
    to: mpsc::Sender<anyhow::Result<Shown>>,
) {
    loop {
        let service = selected.borrow().clone();
        let next = events.next(service.as_deref()).await;
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
        let answer = answer.successful().await?;
        Ok(Self { admin: admin.clone(), answer, received: Vec::new() })
    }

    /// Returns the next event, with the endpoints of a service; by default, of the busiest one.
    async fn next(&mut self, service: Option<&str>) -> anyhow::Result<Shown> {
        let event = self.next_event().await?;
        let services = &event.status.services.list;
        let busiest = || services.iter().max_by_key(|row| row.tunnels);
        let Some(name) = service.or_else(|| Some(&*busiest()?.service)) else {
            return Ok(Shown { event, service: None });
        };
        let page = self.admin.request(Method::GET, "/status", &[("service", name)]).await?;
        // The service may be gone since the event.
        let service = match page.successful().await {
            Ok(page) => {
                page.decode::<StatusPage<IgnoredAny>>().await?.services.list.into_iter().next()
            }
            Err(_) => None,
        };
        Ok(Shown { event, service })
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
