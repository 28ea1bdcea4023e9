//! Screen of `strait top`: the selected tab and row, their drawing, and all tabs as text.

use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Paragraph, Row, Table, TableState, Tabs, Wrap};

use super::panes::{Cell, Grid, Mark, Pane, Shown, panes};
use crate::cli::text;
use crate::labels::escape_control;

/// Index of the services among the panes.
const SERVICES: usize = 1;
/// Maximum number of problems on the screen.
const PROBLEMS_SHOWN: usize = 3;
/// Spaces between two columns.
const GAP: u16 = 2;

pub(super) struct View {
    pub(super) shown: Shown,
    /// Time since which nothing new was received, and why.
    lost: Option<(Instant, String)>,
    pane: usize,
    /// Selected row of each pane.
    rows: [usize; 6],
}

impl View {
    /// Creates the view of the first event, with the busiest service selected.
    pub(super) fn new(shown: Shown) -> Self {
        let mut rows = [0; 6];
        let listed = shown.event.status.services.list.iter().enumerate();
        let busiest = listed.max_by_key(|(_, row)| row.tunnels);
        rows[SERVICES] = busiest.map_or(0, |(index, _)| index);
        Self { shown, lost: None, pane: 0, rows }
    }

    pub(super) fn update(&mut self, update: anyhow::Result<Shown>) {
        match update {
            Ok(shown) => {
                self.shown = shown;
                self.lost = None;
            }
            Err(error) => {
                let since = self.lost.take().map_or_else(Instant::now, |(since, _)| since);
                self.lost = Some((since, escape_control(&format!("{error:#}"))));
            }
        }
    }

    /// Returns the name of the selected service.
    pub(super) fn service(&self) -> Option<String> {
        let list = &self.shown.event.status.services.list;
        let row = list.get(self.rows[SERVICES].min(list.len().saturating_sub(1)));
        row.map(|row| row.service.clone())
    }

    /// Returns the name of the selected service if its tab is shown.
    pub(super) fn service_on_screen(&self) -> Option<String> {
        self.service().filter(|_| self.pane == SERVICES)
    }

    /// Applies a key. Returns true if it ends the program.
    pub(super) fn press(&mut self, event: &Event) -> bool {
        let Some(key) = event.as_key_press_event() else { return false };
        let panes = panes(&self.shown);
        let last = panes[self.pane].grids[0].rows.len().saturating_sub(1);
        let row = &mut self.rows[self.pane];
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Tab | KeyCode::Right => self.pane = (self.pane + 1) % panes.len(),
            KeyCode::BackTab | KeyCode::Left => {
                self.pane = (self.pane + panes.len() - 1) % panes.len();
            }
            KeyCode::Down => *row = (*row + 1).min(last),
            KeyCode::Up => *row = (*row).min(last).saturating_sub(1),
            _ => {}
        }
        false
    }

    /// Draws the selected tab.
    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        let status = &self.shown.event.status;
        let panes = panes(&self.shown);
        let pane = &panes[self.pane];
        let problems = status.problems.iter().take(PROBLEMS_SHOWN);
        let problems = problems.map(|it| Line::from(escape_control(it)).red());
        let space = (!status.problems.is_empty()).then(Line::default);
        let problems: Vec<_> = problems.chain(space).collect();
        let [head, tabs, above, middle, below] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(2),
            Constraint::Length(length(problems.len())),
            Constraint::Fill(1),
            Constraint::Length(3),
        ])
        .areas(frame.area());
        frame.render_widget(self.head(), head);
        let names = panes.iter().map(|pane| pane.name);
        frame.render_widget(Tabs::new(names).select(self.pane).divider(" "), tabs);
        frame.render_widget(Text::from(problems), above);
        let heights = pane.grids.iter().map(|grid| 3 + grid.rows.len().max(1));
        let heights = fit(heights, middle.height).into_iter().map(Constraint::Length);
        let areas = Layout::vertical(heights).split(middle);
        for (index, (grid, area)) in pane.grids.iter().zip(areas.iter()).enumerate() {
            let selected = (index == 0).then(|| self.rows[self.pane]);
            draw_grid(frame, grid, *area, selected);
        }
        let footer =
            Text::from_iter([selected_detail(pane, self.rows[self.pane]), KEYS.to_owned()]);
        frame.render_widget(Paragraph::new(footer).dim().wrap(Wrap { trim: false }), below);
    }

    /// Returns the line with the gateway and its readiness.
    fn head(&self) -> Line<'static> {
        let status = &self.shown.event.status;
        let name = format!(
            "strait {}, cluster {}, network {}  ",
            status.version, status.cluster, status.network
        );
        let name = escape_control(&name).bold();
        let state = match (&self.lost, status.ready) {
            (Some((since, why)), _) => {
                let seconds = Duration::from_secs(since.elapsed().as_secs());
                format!("no data for {}: {why}", humantime::format_duration(seconds)).red()
            }
            (None, true) => "ready".green(),
            (None, false) => escape_control(&pending(&status.pending)).red(),
        };
        Line::from_iter([name, state])
    }

    /// Returns all tabs as text.
    pub(super) fn text(&self, color: bool) -> String {
        let mut out = text::Text::new(color);
        let status = &self.shown.event.status;
        let (version, cluster, network) = (&status.version, &status.cluster, &status.network);
        let pending = if status.ready { "ready".to_owned() } else { pending(&status.pending) };
        out.line(&format!("strait {version}, cluster {cluster}, network {network}  {pending}"));
        status.problems.iter().for_each(|problem| out.line(&format!("  {problem}")));
        for grid in panes(&self.shown).iter().flat_map(|pane| &pane.grids) {
            out.heading(&grid.title, "");
            let cells: Vec<_> = (0..grid.header.len())
                .map(|index| move |row: &Vec<Cell>| row[index].text.clone())
                .collect();
            let columns: Vec<text::Column<'_, Vec<Cell>>> =
                grid.header.iter().zip(&cells).map(|(name, cell)| (*name, cell as _)).collect();
            match grid.rows.is_empty() {
                true => out.line(&format!("  {}", grid.none)),
                false => out.table(&grid.rows, &columns),
            }
        }
        out.finish()
    }
}

const KEYS: &str = "q ends, Tab or left and right: tab, up and down: row";

fn pending(conditions: &[String]) -> String {
    format!("not ready, pending: {}", conditions.join(", "))
}

/// Returns the last cell of the selected row, for which a screen is often too narrow.
fn selected_detail(pane: &Pane, selected: usize) -> String {
    let Some(grid) = pane.grids.first() else { return String::new() };
    let row = grid.rows.get(selected.min(grid.rows.len().saturating_sub(1)));
    match (grid.header.last(), row.and_then(|row| row.last())) {
        (Some(name), Some(cell)) if cell.text != "-" => format!("{name}  {}", cell.text),
        _ => String::new(),
    }
}

fn length(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

/// Shortens the longest of the lengths until their sum fits.
fn fit(lengths: impl Iterator<Item = usize>, room: u16) -> Vec<u16> {
    let mut lengths: Vec<_> = lengths.map(|one| length(one).min(room)).collect();
    while lengths.iter().map(|one| usize::from(*one)).sum::<usize>() > usize::from(room) {
        let Some(longest) = lengths.iter_mut().max() else { break };
        *longest -= 1;
    }
    lengths
}

fn draw_grid(frame: &mut Frame<'_>, grid: &Grid, area: Rect, selected: Option<usize>) {
    let [title, body] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(area);
    frame.render_widget(grid.title.as_str().bold(), title);
    if grid.rows.is_empty() {
        frame.render_widget(format!("  {}", grid.none).dim(), body);
        return;
    }
    let width = |index: usize| {
        let cells = grid.rows.iter().map(|row| row[index].text.chars().count());
        cells.max().unwrap_or(0).max(grid.header[index].len())
    };
    let gaps = GAP * length(grid.header.len());
    let widths = fit((0..grid.header.len()).map(width), body.width.saturating_sub(gaps));
    let rows = grid.rows.iter().map(|row| {
        Row::new(row.iter().map(|cell| {
            let color = match cell.mark {
                Mark::Plain => Color::Reset,
                Mark::Good => Color::Green,
                Mark::Warn => Color::Yellow,
                Mark::Bad => Color::Red,
            };
            Text::styled(cell.text.as_str(), Style::new().fg(color))
        }))
    });
    let table = Table::new(rows, widths)
        .header(Row::new(grid.header.iter().copied()).dim())
        .column_spacing(GAP)
        .row_highlight_style(Modifier::REVERSED);
    let last = grid.rows.len() - 1;
    let mut state = TableState::new().with_selected(selected.map(|row| row.min(last)));
    frame.render_stateful_widget(table, body, &mut state);
}
