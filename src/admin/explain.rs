//! GET `/explain`: outcome of a tunnel, without opening it. The handler computes the answer.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::explain::Question;

use super::{AdminState, stream};

/// Answer, which is written as JSON.
pub type AnswerWriter = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + Send>;

type Parameters = BTreeMap<String, String>;

/// Function that answers the question, or returns the mistake in it.
#[derive(Clone)]
pub struct ExplainHandler(Arc<Handler>);

type Handler = dyn Fn(&Question) -> Result<AnswerWriter, String> + Send + Sync;

impl ExplainHandler {
    /// Wraps the function.
    pub fn new(
        say: impl Fn(&Question) -> Result<AnswerWriter, String> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(say))
    }
}

impl fmt::Debug for ExplainHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Explains")
    }
}

/// Responds with the answer, or with 400 to an invalid query. A service with many endpoints takes
/// long, so both the computation and the writing use blocking threads.
pub(super) async fn explain(
    State(state): State<AdminState>,
    Query(parameters): Query<Parameters>,
) -> Response {
    let made = tokio::task::spawn_blocking(move || (state.explain.0)(&parse(&parameters)?));
    match made.await {
        Ok(Ok(written)) => {
            let body = stream::body(move |pieces| written(pieces));
            ([(header::CONTENT_TYPE, "application/json")], body).into_response()
        }
        Ok(Err(why)) => (StatusCode::BAD_REQUEST, format!("{why}\n")).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Parses the parameters of a query, with the keys of [`Question::parameters`].
///
/// # Errors
/// An unknown key or an invalid address.
fn parse(parameters: &Parameters) -> Result<Question, String> {
    let mut question = Question::default();
    for (key, value) in parameters {
        let text = || Some(value.clone());
        match &**key {
            "from" => question.from = text(),
            "cluster" => question.cluster = text(),
            "to" => question.to = text(),
            "sni" => question.sni = text(),
            "alpn" => question.alpn = value.split(',').map(Into::into).collect(),
            "listener" => question.listener = text(),
            "origin" => question.origin = text(),
            "address" => {
                let address = value.parse().map_err(|_| {
                    format!("invalid address {value:?}; write an IP address, such as 192.0.2.1")
                });
                question.address = Some(address?);
            }
            "all" => question.all = true,
            other => {
                return Err(format!(
                    "unknown parameter {other:?}; write from, cluster, to, sni, alpn, listener, \
                     origin, address or all"
                ));
            }
        }
    }
    Ok(question)
}

#[cfg(test)]
mod tests {
    use super::super::admin_router;
    use super::super::tests::{ask, fixture};
    use super::*;

    #[tokio::test]
    async fn a_question_is_answered_or_refused_with_what_to_write() {
        let fixture = fixture();
        let router = admin_router(fixture.state.clone());
        let (status, body) = ask(router.clone(), "GET", "/explain?to=a%3A80&all=").await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(body, r#"[("to", "a:80"), ("all", "")]"#);
        let (status, body) = ask(router, "GET", "/explain?to=wrong").await;
        assert_eq!(
            (status, &*body),
            (StatusCode::BAD_REQUEST, "write it right\n")
        );
    }
}
