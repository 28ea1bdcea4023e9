//! POST `/logging`: reads and changes the log level, with the parameters of ztunnel.

use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde::Deserialize;

use super::AdminState;

/// Query parameters: `?level=info,mod=debug` and `?reset`, which needs no value.
#[derive(Debug, Deserialize)]
pub(super) struct Parameters {
    level: Option<String>,
    reset: Option<String>,
}

/// Changes the log level, and answers with the level in use. Resets first if both parameters are
/// given, like ztunnel.
pub(super) async fn logging(
    State(state): State<AdminState>,
    Query(parameters): Query<Parameters>,
) -> (StatusCode, String) {
    let changed = parameters.reset.is_some() || parameters.level.is_some();
    if parameters.reset.is_some() {
        state.log.reset();
    }
    if let Some(level) = parameters.level
        && let Err(error) = state.log.set(&level)
    {
        return (StatusCode::BAD_REQUEST, format!("{error}\n"));
    }
    let current = state.log.current();
    if changed {
        tracing::info!(level = current, "log level changed by /logging");
    }
    (StatusCode::OK, format!("current log level is {current}\n"))
}
